"""Files that others may read at any moment: they find the old text or the new one, never a part.

Models: one writer at a time or the last one winning. Ignores: what is written.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, text: str) -> None:
    """Replace the file at once; its folder must exist.

    Raises: OSError where the folder cannot be written; what was there stays.
    """
    number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
