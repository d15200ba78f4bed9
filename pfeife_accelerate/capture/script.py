"""Where in the script we are: for errors that a person has to act on."""

from __future__ import annotations

import sys


def script_line() -> str:
    """`file:line` of the innermost frame outside torch and this package."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("torch.", "pfeife_accelerate.", "accelerate.")) and name not in ("torch", "copy"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "unknown line"
