"""The options a person can set, and the three ways to set them.

Models: keyword arguments over environment over yaml; the yaml section travels to the children by environment.
Ignores: whether the values suit the model or the launch; whoever uses an option checks that.

With `_autoload`, this is the only file that reads or writes `os.environ`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from pfeife_accelerate.errors import PfeifeError, did_you_mean

__all__ = [
    "ENABLED_VARIABLE",
    "SCHEDULES",
    "SECTION",
    "PfeifePlugin",
    "cache_folder",
    "child_environment",
    "default_variable",
    "export",
    "flag",
    "is_enabled",
    "overlay",
    "process_variable",
    "section_variables",
]

SECTION: Final = "pfeife_config"
PREFIX: Final = "PFEIFE_"
ENABLED_VARIABLE: Final = "PFEIFE_ENABLED"
SCHEDULES: Final = ("auto", "gpipe", "1f1b", "looped", "interleaved", "wave", "zb-h1", "zb-v", "list")
BACKWARD: Final = ("whole", "split")
RECOMPUTE: Final = ("none", "auto")
ON_CAPTURE_FAILURE: Final = ("fallback", "error")
ON_LOSS_MISMATCH: Final = ("fallback", "error")

_FALSE: Final = frozenset({"0", "false", "no", "off"})
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_COUNT: Final = {"kind": "count", "minimum": 1}
#: What launchers tell a process about its place.
_LAUNCHED: Final = (
    PREFIX,
    "ACCELERATE_",
    "TORCHELASTIC_",
    "MASTER_",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
)


@dataclass(frozen=True, kw_only=True)
class PfeifePlugin:
    """How a launch is cut into pipelines; every field has a default that works.

    Pass it as `Accelerator(pfeife_plugin=PfeifePlugin(...))`, or set the same names in the yaml's
    `pfeife_config:` section, or as `PFEIFE_<NAME>` environment variables.
    """

    pipeline_size: int | None = field(default=None, metadata=_COUNT)
    """Processes of one pipeline. None: all processes of the launch; a divisor of it: several pipelines,
    whose gradients are averaged as DDP does."""

    num_microbatches: int | None = field(default=None, metadata=_COUNT)
    """Pieces that a batch is cut into. None: chosen by the planner. More pieces, less idle time, smaller operations."""

    schedule: str = field(default="auto", metadata={"kind": "choice", "choices": SCHEDULES})
    """Order of the pieces: "gpipe" (all forwards first: most memory), "1f1b", "looped" (several stages a rank),
    "zb-h1" (1f1b with the gradients of weights in the gaps); "auto" lets the planner choose."""

    num_loops: int | None = field(default=None, metadata=_COUNT)
    """Stages that each rank holds under schedule "looped". None: chosen by the planner."""

    microbatches_per_loop: int | None = field(default=None, metadata=_COUNT)
    """Micro-batches that go through a loop before the next loop starts. None: chosen by the planner."""

    prefetch_forwards: int | None = field(default=None, metadata={"kind": "count", "minimum": 0})
    """Forwards started before they are needed; each costs a micro-batch of memory. None: chosen by the planner."""

    split_points: tuple[str, ...] = field(default=(), metadata={"kind": "names"})
    """Module names (`model.layers.8`) at which stages start. Empty: chosen by the planner."""

    backward: str = field(default="whole", metadata={"kind": "choice", "choices": BACKWARD})
    """"split": gradients of values first, those of weights when there is nothing better to do (schedules "zb-h1" and
    "zb-v" always do that). "whole": both together."""

    recompute: str = field(default="auto", metadata={"kind": "choice", "choices": RECOMPUTE})
    """"auto": where a plan does not fit into memory otherwise, some stages keep their inputs alone and compute their
    activations again in the backward pass. "none": such a model is refused."""

    compile: str | None = field(default=None, metadata={"kind": "name"})
    """Compile each stage, forward and backward, by "inductor" or any other Dynamo backend; "none": run it as it is.
    None: what Accelerate's `dynamo_config` says, which is not to compile unless it is set."""

    plan_file: str | None = field(default=None, metadata={"kind": "path"})
    """A plan made before (`pfeife plan`), used instead of planning."""

    profile_file: str | None = field(default=None, metadata={"kind": "path"})
    """Instead of training: at the first training call, measure, write the costs into this file, and end the script.
    `pfeife profile` sets it."""

    trace: str | None = field(default=None, metadata={"kind": "path"})
    """File into which some training steps are recorded, with the plan: what each rank did when. `pfeife trace` shows
    it."""

    trace_after: int | None = field(default=None, metadata={"kind": "count", "minimum": 0})
    """Planned training steps that are left out before the first recorded one. None: 2."""

    trace_steps: int | None = field(default=None, metadata=_COUNT)
    """Training steps that are recorded. None: 3."""

    cache_dir: str | None = field(default=None, metadata={"kind": "path"})
    """Folder for what has been measured on this machine. None: `pfeife_accelerate` in the user's cache folder
    (`$XDG_CACHE_HOME`, or else `~/.cache`)."""

    on_capture_failure: str = field(default="fallback", metadata={"kind": "choice", "choices": ON_CAPTURE_FAILURE})
    """A model that cannot be captured: "fallback" trains it whole on every process, exactly and with no gain in speed,
    after a warning that names the line; "error" refuses it."""

    on_loss_mismatch: str = field(default="fallback", metadata={"kind": "choice", "choices": ON_LOSS_MISMATCH})
    """A loss that comes out otherwise a micro-batch at a time than over the whole batch: a fault of this package,
    looked for in the first step. "fallback" takes the exact two-phase order after a warning; "error" ends the run."""

    batch_dims: tuple[tuple[str, int | None], ...] = field(default=(), metadata={"kind": "dims"})
    """Dimension of the batch in an argument of the model, by name (`src`, dotted for nested ones:
    `conditions.mask`) or position (`"0"`); None: the argument has no batch. A mapping is accepted too. Arguments that
    are not named: decided by their sizes, with a warning where that is in doubt."""

    plan_cache: bool = field(default=True, metadata={"kind": "flag"})
    """Whether plans are kept in `cache_dir` and used again where nothing has changed that they depend on."""

    verbose: int = field(default=0, metadata={"kind": "level", "minimum": 0, "maximum": 2})
    """0: warnings only; 1: the plan and its estimate; 2: every decision."""

    def __post_init__(self) -> None:
        """Refuse wrong types and values; a list of split points and a mapping of dimensions become tuples."""
        if isinstance(self.split_points, list):
            object.__setattr__(self, "split_points", tuple(self.split_points))
        if isinstance(self.batch_dims, Mapping):
            object.__setattr__(self, "batch_dims", tuple(self.batch_dims.items()))
        values = vars(self)
        for option in fields(self):
            _check(option.name, values[option.name], option.metadata, where="PfeifePlugin(...)")

    @classmethod
    def from_mapping(cls, section: Mapping[str, Any] | None) -> PfeifePlugin:
        """Build from the yaml section; "auto" and null mean the default, unknown keys are refused."""
        where = f"yaml section {SECTION}:"
        if section is None:
            return cls()
        if not isinstance(section, Mapping):
            raise PfeifeError(
                id="PF102",
                what=f"{SECTION} must be a mapping of options, got {section!r}",
                where=where,
                hints=(f"{SECTION}:\n  pipeline_size: 2", f"an empty section ({SECTION}: {{}}) takes all defaults"),
            )
        options = {option.name: option for option in fields(cls)}
        given: dict[str, Any] = {}
        for key, value in section.items():
            if key not in options:
                raise _unknown_option(str(key), tuple(options), where=where, kind="key")
            if value is None or (value == "auto" and options[key].metadata["kind"] != "choice"):
                continue
            if options[key].metadata["kind"] == "names" and isinstance(value, (list, str)):
                value = tuple(value) if isinstance(value, list) else (value,)
            if options[key].metadata["kind"] == "dims" and isinstance(value, Mapping):
                value = tuple((str(name), None if dim == "none" else dim) for name, dim in value.items())
            _check(key, value, options[key].metadata, where=where)
            given[key] = value
        return cls(**given)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> PfeifePlugin:
        """Build from `PFEIFE_*` variables (of this process when `environ` is None); unknown ones are refused."""
        options = {PREFIX + option.name.upper(): option for option in fields(cls)}
        given: dict[str, Any] = {}
        for variable, text in sorted(section_variables(environ).items()):
            if variable == ENABLED_VARIABLE:
                _parse_flag(variable, text)
                continue
            if variable not in options:
                raise _unknown_option(variable, (*options, ENABLED_VARIABLE), where="environment", kind="variable")
            option = options[variable]
            if text == "auto" and option.metadata["kind"] != "choice":
                continue
            value = _parse(variable, text, option.metadata)
            _check(option.name, value, option.metadata, where=f"environment variable {variable}")
            given[option.name] = value
        return cls(**given)

    def to_environment(self) -> dict[str, str]:
        """The variables that `from_environment` turns into an equal plug-in: what differs from the defaults."""
        variables = {ENABLED_VARIABLE: "true"}
        for name, value in _non_default(self).items():
            variables[PREFIX + name.upper()] = _as_text(value)
        return variables


def overlay(upper: PfeifePlugin, lower: PfeifePlugin) -> PfeifePlugin:
    """Options of `lower` replaced by those that `upper` sets to something else than the default."""
    return replace(lower, **_non_default(upper))


def section_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """All variables that start with `PFEIFE_`, known or not."""
    source = os.environ if environ is None else environ
    return {name: value for name, value in source.items() if name.startswith(PREFIX)}


def is_enabled(environ: Mapping[str, str] | None = None) -> bool:
    """Whether a pfeife section is present: any `PFEIFE_*` variable, unless `PFEIFE_ENABLED` says no."""
    variables = section_variables(environ)
    return bool(variables) and variables.get(ENABLED_VARIABLE, "true").strip().lower() not in _FALSE


def export(plugin: PfeifePlugin) -> None:
    """Make `plugin` what this process and its children read from the environment."""
    for variable in section_variables():
        del os.environ[variable]
    os.environ.update(plugin.to_environment())


def child_environment(plugin: PfeifePlugin | None, variables: Mapping[str, str]) -> dict[str, str]:
    """For a process that is no part of this one's launch: what this one has, `plugin`'s options, these variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHED)}
    return {**kept, **(plugin.to_environment() if plugin is not None else {}), **variables}


def cache_folder(plugin: PfeifePlugin) -> Path:
    """Where measurements are kept: the option `cache_dir`, or a folder of ours in the user's cache."""
    if plugin.cache_dir is not None:
        return Path(plugin.cache_dir).expanduser()
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification: a relative path is invalid and to be ignored, an empty one is as if unset.
    return (cache if cache.is_absolute() else Path("~/.cache").expanduser()) / "pfeife_accelerate"


def process_variable(name: str) -> str | None:
    """The value of a variable set by somebody else (a launcher, accelerate); None when unset or empty."""
    return os.environ.get(name) or None


def default_variable(name: str, value: str) -> None:
    """Set a variable unless it is set already."""
    os.environ.setdefault(name, value)


def flag(name: str) -> bool:
    """Whether a variable that others own holds a true value, as accelerate reads it."""
    return os.environ.get(name, "").strip().lower() in (_TRUE | {"y", "t"})


def _non_default(plugin: PfeifePlugin) -> dict[str, Any]:
    values = vars(plugin)
    return {option.name: values[option.name] for option in fields(plugin) if values[option.name] != option.default}


def _as_text(value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    return ",".join(item if isinstance(item, str) else f"{item[0]}={_as_text(item[1]).lower()}" for item in value)


def _parse_flag(variable: str, text: str) -> bool:
    word = text.strip().lower()
    if word in _TRUE | _FALSE:
        return word in _TRUE
    raise PfeifeError(
        id="PF102",
        what=f"{variable} must be true or false, got {text!r}",
        where=f"environment variable {variable}",
    )


def _parse(variable: str, text: str, metadata: Mapping[str, Any]) -> Any:
    match metadata["kind"]:
        case "count" | "level":
            try:
                return int(text)
            except ValueError:
                raise PfeifeError(
                    id="PF102",
                    what=f"{variable} must be {_expected(metadata)}, got {text!r}",
                    where=f"environment variable {variable}",
                ) from None
        case "flag":
            return _parse_flag(variable, text)
        case "names":
            return tuple(name.strip() for name in text.split(",") if name.strip())
        case "dims":
            return tuple(_parse_dim(item) for item in text.split(",") if item.strip())
        case _:
            return text


def _parse_dim(item: str) -> tuple[str, Any]:
    """`name=1` or `name=none`; what is neither stays text, and is refused by the check."""
    name, _, dim = (part.strip() for part in item.partition("="))
    if dim.lower() in ("none", "null"):
        return name, None
    return name, int(dim) if dim.isdecimal() else dim


def _check(name: str, value: Any, metadata: Mapping[str, Any], *, where: str) -> None:
    """Raise PF102 unless `value` is what the option's metadata asks for."""
    match metadata["kind"]:
        case "count" | "level":
            fits = value is None if metadata["kind"] == "count" else False
            if isinstance(value, int) and not isinstance(value, bool):
                fits = metadata["minimum"] <= value <= metadata.get("maximum", value)
        case "flag":
            fits = isinstance(value, bool)
        case "choice":
            fits = value in metadata["choices"]
        case "names":
            fits = isinstance(value, tuple) and all(isinstance(item, str) and _is_name(item) for item in value)
        case "dims":
            fits = isinstance(value, tuple) and all(_is_dim(item) for item in value)
        case _:
            fits = value is None or (isinstance(value, str) and value != "" and value == value.strip())
    if fits:
        return
    choices = metadata.get("choices", ())
    near = did_you_mean(value, choices) if isinstance(value, str) else None
    raise PfeifeError(
        id="PF102",
        what=f"{name} must be {_expected(metadata)}, got {value!r}",
        where=where,
        hints=() if near is None else (f"did you mean {near!r}?",),
    )


def _is_name(text: str) -> bool:
    # Names travel in a comma-separated variable.
    return text != "" and text == text.strip() and "," not in text


def _is_dim(item: Any) -> bool:
    """A pair of an argument's name and the number of a dimension, or None."""
    if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)):
        return False
    name, dim = item
    fits = dim is None or (isinstance(dim, int) and not isinstance(dim, bool) and dim >= 0)
    return fits and _is_name(name) and "=" not in name


def _expected(metadata: Mapping[str, Any]) -> str:
    match metadata["kind"]:
        case "count":
            return f'a whole number >= {metadata["minimum"]} or "auto"'
        case "level":
            return f"a whole number from {metadata['minimum']} to {metadata['maximum']}"
        case "flag":
            return "true or false"
        case "choice":
            return "one of " + ", ".join(f'"{name}"' for name in metadata["choices"])
        case "names":
            return "a list of module names"
        case "name":
            return 'the name of a Dynamo backend ("inductor"), or "none"'
        case "dims":
            return "a mapping of argument names to dimensions >= 0, or to none for an argument without a batch"
        case _:
            return "a path"


def _unknown_option(word: str, choices: tuple[str, ...], *, where: str, kind: str) -> PfeifeError:
    near = did_you_mean(word, choices)
    known = "known: " + ", ".join(choices)
    return PfeifeError(
        id="PF101",
        what=f"unknown {kind} {word!r}",
        where=where,
        why="an option that is not understood would be skipped silently",
        hints=(known,) if near is None else (f"did you mean {near!r}?", known),
    )
