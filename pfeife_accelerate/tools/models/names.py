"""From what a person types for MODEL to a model case.

The order in which a name is looked up: `library:name`; a file or folder with a configuration; models that installed
packages register; the zoo; timm; transformers; diffusers.

A package registers a model in the entry-point group `pfeife_accelerate.models`: its name, and a function that takes the
`ModelOptions` and gives a `ModelCase`. It wins over a zoo member of the same name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Final

from pfeife_accelerate.errors import PfeifeError, did_you_mean
from pfeife_accelerate.tools.models.case import ModelCase, ModelOptions
from pfeife_accelerate.tools.models.diffusers_models import diffusers_names, from_diffusers, is_diffusers_name
from pfeife_accelerate.tools.models.timm_models import from_timm, is_timm_name, timm_names
from pfeife_accelerate.tools.models.transformers_models import (
    from_transformers,
    from_transformers_config,
    is_transformers_name,
    transformers_names,
)
from pfeife_accelerate.zoo import MEMBERS, ZooModel

__all__ = ["GROUP", "resolve"]

GROUP: Final = "pfeife_accelerate.models"
_LIBRARIES: Final = ("timm", "transformers", "diffusers")


def resolve(name: str, options: ModelOptions) -> ModelCase:
    """The model called `name`.

    Raises: PfeifeError PF131 for an unknown name or file, PF132 to PF135 and PF139 for what does not suit the model.
    """
    prefix, separator, rest = name.partition(":")
    if separator and prefix.lower() in _LIBRARIES:
        return _of_library(prefix.lower(), rest, options)
    path = Path(name)
    if path.suffix == ".json" or path.exists():
        return _of_file(path, options)
    registered = _registered()
    if name in registered:
        return _of_entry_point(registered[name], options)
    if name in MEMBERS:
        return _of_member(MEMBERS[name], options)
    if is_timm_name(name):
        return from_timm(name, options)
    if is_transformers_name(name):
        return from_transformers(name, options)
    if is_diffusers_name(name):
        return from_diffusers(name, options)
    raise _unknown(name, [*registered, *MEMBERS, *timm_names(), *transformers_names(), *diffusers_names()])


def _of_library(library: str, name: str, options: ModelOptions) -> ModelCase:
    match library:
        case "timm":
            if not is_timm_name(name):
                raise _unknown(name, timm_names())
            return from_timm(name, options)
        case "transformers":
            return from_transformers(name, options)
        case _:
            return from_diffusers(name, options)


def _of_member(member: ZooModel, options: ModelOptions) -> ModelCase:
    own = member.size
    options = replace(options, seq=options.seq or own.seq, resolution=options.resolution or own.resolution)
    case = _of_config(member.config, member.name, options)
    assert case is not None, member.name
    return case


def _registered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _of_entry_point(point: EntryPoint, options: ModelOptions) -> ModelCase:
    case = point.load()(options)
    if not isinstance(case, ModelCase):
        raise PfeifeError(
            id="PF136",
            what=f"{point.value} gave {type(case).__name__} for the model {point.name!r}",
            why=f"an entry point of the group {GROUP} gives a ModelCase",
        )
    return case


def _of_file(path: Path, options: ModelOptions) -> ModelCase:
    file = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _not_a_config(file, f"{type(error).__name__}: {error}") from error
    case = _of_config(data, str(path), options) if isinstance(data, dict) else None
    if case is None:
        why = "it has neither a model_type (transformers), nor a _class_name (diffusers), nor an architecture (timm)"
        raise _not_a_config(file, why)
    return case


def _of_config(data: Mapping[str, Any], title: str, options: ModelOptions) -> ModelCase | None:
    """The case for a configuration as one of the libraries writes it; None if none does."""
    if "_class_name" in data:
        plain = {key: value for key, value in data.items() if not key.startswith("_")}
        return from_diffusers(str(data["_class_name"]), options, data=plain, title=title)
    if "model_type" in data:
        return from_transformers_config(data, title, options)
    if "architecture" in data:
        own = {key: data[key] for key in ("num_classes",) if key in data} | dict(data.get("model_args") or {})
        name = str(data["architecture"])
        if not is_timm_name(name):
            raise _unknown(name, timm_names())
        return from_timm(name, replace(options, overrides={**own, **(options.overrides or {})}), title=title)
    return None


def _not_a_config(file: Path, why: str) -> PfeifeError:
    return PfeifeError(
        id="PF131",
        what=f"{file} is not the configuration of a model",
        why=why,
        hints=("a config.json of transformers, diffusers or timm, or the folder that holds it",),
    )


def _unknown(name: str, known: list[Any]) -> PfeifeError:
    near = did_you_mean(name, known)
    return PfeifeError(
        id="PF131",
        what=f"no model is called {name!r}",
        why="it is no member of the zoo, and no model of timm, transformers or diffusers",
        hints=(
            *((f"did you mean {near!r}?",) if near else ()),
            f"the zoo: {', '.join(MEMBERS)}",
            "transformers:llama, diffusers:UNet2DConditionModel, or a config.json",
        ),
    )
