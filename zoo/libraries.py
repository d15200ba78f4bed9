"""The libraries that models come from, imported when a model is asked for.

Models: a library that is there, or a refusal that says how to get it. Ignores: versions.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from pfeife_accelerate.errors import PfeifeError

__all__ = ["is_installed", "library"]


def library(name: str) -> ModuleType:
    """An optional library.

    Raises: PfeifeError PF135 where it is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise PfeifeError(
            id="PF135",
            what=f"{name} is not installed",
            why=f"the model is one of {name}'s",
            hints=("pip install 'pfeife_accelerate[zoo]'",),
        ) from error


def is_installed(name: str) -> bool:
    """Whether a library could be imported; it is not."""
    return find_spec(name) is not None
