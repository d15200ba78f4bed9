"""The folder of training scripts, as tests load its files."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[1] / "training_scripts"
CONFIGS = FOLDER / "configs"


def load(name: str) -> ModuleType:
    """One file of that folder as a module."""
    path = FOLDER / name
    spec = importlib.util.spec_from_file_location(f"training_scripts_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module
