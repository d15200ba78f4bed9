"""The attributes of other libraries that we replace, as one table.

Models: replacement of functions, methods, static and class methods and properties by `hook(original, ...)`, with the
signature checked first, and exact restoration.
Ignores: what the hooks do.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import ClassMethodDescriptorType, ModuleType
from typing import Any, Final

from pfeife_accelerate.errors import PfeifeError

__all__ = ["SEAMS", "Seam", "SeamGroup", "SeamRow", "check", "install", "installed", "uninstall"]

KNOWN_VERSIONS: Final = "torch 2.10 - 2.14, accelerate 1.10 - 1.15"


class SeamGroup(Enum):
    """When a seam is put in."""

    LAUNCH = "with accelerate, for its launcher"
    ALWAYS = "with accelerate"
    ACTIVE = "when a pipeline is configured"
    TORCH = "when a pipeline is configured, with torch itself"
    TRAINER = "when a pipeline is configured, with transformers' Trainer"
    ARGUMENTS = "when a pipeline is configured, with transformers' TrainingArguments"


@dataclass(frozen=True, kw_only=True)
class Seam:
    """One replaced attribute.

    `owner` is "module:Class" or "module"; `hook` is "module:function", called as `hook(original, *args, **kwargs)`, or
    for a property as `hook(original_getter, self)`. `signature` lists the parameters without defaults and annotations;
    a trailing "..." allows more of them.
    """

    owner: str
    name: str
    hook: str
    signature: str
    when: SeamGroup


_VIEW: Final = "pfeife_accelerate.integration.process_view"
_LAUNCH: Final = "pfeife_accelerate.integration.launch"
_STATE: Final = "accelerate.state:PartialState"
_TRAINING: Final = "pfeife_accelerate.integration.training"
_ACCELERATOR: Final = "accelerate.accelerator:Accelerator"


def _launch(owner: str, name: str, hook: str, signature: str) -> Seam:
    return Seam(owner=owner, name=name, hook=f"{_LAUNCH}:{hook}", signature=signature, when=SeamGroup.LAUNCH)


def _view(owner: str, name: str, hook: str, signature: str) -> Seam:
    return Seam(owner=owner, name=name, hook=f"{_VIEW}:{hook}", signature=signature, when=SeamGroup.ACTIVE)


def _trainer(owner: str, name: str, when: SeamGroup, signature: str = "(self)") -> Seam:
    hook = f"pfeife_accelerate.integration.trainer:{name}"
    return Seam(owner=owner, name=name, hook=hook, signature=signature, when=when)


SEAMS: Final[tuple[Seam, ...]] = (
    _launch(
        "accelerate.commands.utils:CustomArgumentParser", "add_argument", "add_argument", "(self, *args, **kwargs)"
    ),
    _launch("accelerate.commands.config.config_args:BaseConfig", "process_config", "process_config", "(config_dict)"),
    # The command line takes both from here by name, after it has imported its configuration module.
    _launch("accelerate.utils", "prepare_multi_gpu_env", "prepare_ranks_env", "(args)"),
    _launch("accelerate.utils", "prepare_simple_launcher_cmd_env", "prepare_single_process", "(args)"),
    Seam(
        owner="accelerate.accelerator:Accelerator",
        name="__init__",
        hook="pfeife_accelerate.integration.activation:accelerator_init",
        signature="(self, device_placement, split_batches, mixed_precision, ...)",
        when=SeamGroup.ALWAYS,
    ),
    _view(_STATE, "__init__", "partial_state_init", "(self, cpu, **kwargs)"),
    _view(_STATE, "is_main_process", "is_main_process", "(self)"),
    _view(_STATE, "is_last_process", "is_last_process", "(self)"),
    _view("accelerate.accelerator:Accelerator", "is_last_process", "is_last_process", "(self)"),
    _view(_STATE, "wait_for_everyone", "wait_for_everyone", "(self)"),
    _view(_STATE, "on_main_process", "on_main_process", "(self, function)"),
    _view(_STATE, "on_local_main_process", "on_local_main_process", "(self, function)"),
    _view(_STATE, "on_last_process", "on_last_process", "(self, function)"),
    _view(_STATE, "on_process", "on_process", "(self, function, process_index)"),
    _view(_STATE, "on_local_process", "on_local_process", "(self, function, local_process_index)"),
    _view(_STATE, "destroy_process_group", "destroy_process_group", "(self, group)"),
    _view("torch.distributed", "barrier", "barrier", "(group, async_op, device_ids, ...)"),
    _view("torch.distributed", "destroy_process_group", "torch_destroy_process_group", "(group)"),
    Seam(
        owner=_ACCELERATOR,
        name="prepare",
        hook=f"{_TRAINING}:prepare",
        signature="(self, *args, device_placement)",
        when=SeamGroup.ACTIVE,
    ),
    Seam(
        owner=_ACCELERATOR,
        name="prepare_model",
        hook=f"{_TRAINING}:prepare_model",
        signature="(self, model, device_placement, evaluation_mode)",
        when=SeamGroup.ACTIVE,
    ),
    Seam(
        owner=_ACCELERATOR,
        name="backward",
        hook=f"{_TRAINING}:backward",
        signature="(self, loss, **kwargs)",
        when=SeamGroup.ACTIVE,
    ),
    Seam(
        owner=_ACCELERATOR,
        name="save_model",
        hook="pfeife_accelerate.integration.state:save_model",
        signature="(self, model, save_directory, ...)",
        when=SeamGroup.ACTIVE,
    ),
    Seam(
        owner=_ACCELERATOR,
        name="register_save_state_pre_hook",
        hook="pfeife_accelerate.integration.state:register_save_state_pre_hook",
        signature="(self, hook)",
        when=SeamGroup.ACTIVE,
    ),
    Seam(
        owner=_ACCELERATOR,
        name="prepare_optimizer",
        hook="pfeife_accelerate.integration.state:prepare_optimizer",
        signature="(self, optimizer, device_placement)",
        when=SeamGroup.ACTIVE,
    ),
    Seam(
        owner="accelerate.accelerator",
        name="save_accelerator_state",
        hook="pfeife_accelerate.integration.state:save_accelerator_state",
        signature="(output_dir, model_states, ...)",
        when=SeamGroup.ACTIVE,
    ),
    # Put in as soon as torch is there: `from torch.nn.utils import clip_grad_norm_` may come before accelerate.
    Seam(
        owner="torch.nn.utils",
        name="clip_grad_norm_",
        hook="pfeife_accelerate.integration.clipping:clip_grad_norm_",
        signature="(parameters, max_norm, norm_type, error_if_nonfinite, foreach)",
        when=SeamGroup.TORCH,
    ),
    Seam(
        owner="torch.nn.utils",
        name="clip_grad_value_",
        hook="pfeife_accelerate.integration.clipping:clip_grad_value_",
        signature="(parameters, clip_value, foreach)",
        when=SeamGroup.TORCH,
    ),
    Seam(
        owner="torch.autograd.function:Function",
        name="apply",
        hook="pfeife_accelerate.integration.functions:apply",
        signature="(cls, *args, **kwargs)",
        when=SeamGroup.TORCH,
    ),
    # The one function behind `unscale_`, `step` and the check for fused optimizers; no public name sees what it found.
    Seam(
        owner="torch.amp.grad_scaler:GradScaler",
        name="_unscale_grads_",
        hook="pfeife_accelerate.integration.scaling:unscale_gradients",
        signature="(self, optimizer, inv_scale, found_inf, allow_fp16)",
        when=SeamGroup.TORCH,
    ),
    _trainer("transformers.trainer:Trainer", "is_world_process_zero", SeamGroup.TRAINER),
    _trainer("transformers.trainer:Trainer", "save_model", SeamGroup.TRAINER, "(self, output_dir, _internal_call)"),
    _trainer("transformers.training_args:TrainingArguments", "should_save", SeamGroup.ARGUMENTS),
    _trainer("transformers.training_args:TrainingArguments", "should_log", SeamGroup.ARGUMENTS),
)


OPTIONAL_MODULES: Final = {
    "transformers.training_args": SeamGroup.ARGUMENTS,
    "transformers.trainer": SeamGroup.TRAINER,
}
"""Modules that may never be imported, and the seams for each."""


@dataclass(frozen=True, kw_only=True)
class SeamRow:
    """What `check` found for one seam; `found_signature` is None when the attribute does not exist."""

    seam: Seam
    is_installed: bool
    matches: bool
    found_signature: str | None


class _Installed:
    """The originals of what is replaced now: patches belong to the process, and so does this record."""

    def __init__(self) -> None:
        self.originals: dict[Seam, tuple[Any, Any]] = {}


_INSTALLED: Final = _Installed()


def install(group: SeamGroup) -> None:
    """Put in the seams of `group` that are not in yet; refuse before the first one if any does not fit."""
    # To find an owner may import torch, which lets this package put in these very seams before we go on.
    owners = {seam: _owner(seam) for seam in SEAMS if seam.when is group and seam not in _INSTALLED.originals}
    waiting = [seam for seam in owners if seam not in _INSTALLED.originals]
    for seam in waiting:
        row = _inspect(seam, owners[seam])
        if not row.matches:
            raise _mismatch(row)
    for seam in waiting:
        owner = owners[seam]
        original = inspect.getattr_static(owner, seam.name)
        replacement = _wrapped(original, _hook(seam))
        setattr(owner, seam.name, replacement)
        _INSTALLED.originals[seam] = (original, inspect.getattr_static(owner, seam.name))


def install_active() -> None:
    """Put in what a configured pipeline needs of torch and accelerate."""
    install(SeamGroup.ACTIVE)
    install(SeamGroup.TORCH)


def install_for(module: str) -> None:
    """Put in what a configured pipeline needs of an optional library's module, once that is loaded."""
    install(OPTIONAL_MODULES[module])


def uninstall(group: SeamGroup | None = None) -> None:
    """Put back the very objects that were there, latest first; None means all groups."""
    for seam, (original, replacement) in reversed(tuple(_INSTALLED.originals.items())):
        if group is not None and seam.when is not group:
            continue
        owner = _owner(seam)
        if inspect.getattr_static(owner, seam.name) is not replacement:
            raise PfeifeError(
                id="PF111",
                what=f"{seam.owner}.{seam.name} was replaced again after us and cannot be restored",
                where=seam.owner,
                hints=("undo the later replacement first",),
            )
        setattr(owner, seam.name, original)
        del _INSTALLED.originals[seam]


def installed() -> tuple[Seam, ...]:
    """The seams that are in now."""
    return tuple(_INSTALLED.originals)


def check() -> tuple[SeamRow, ...]:
    """Look at every seam without changing anything; for `pfeife doctor`."""
    rows = []
    for seam in SEAMS:
        try:
            owner = _owner(seam)
        except (ImportError, AttributeError):
            rows.append(SeamRow(seam=seam, is_installed=False, matches=False, found_signature=None))
            continue
        rows.append(_inspect(seam, owner))
    return tuple(rows)


def _owner(seam: Seam) -> Any:
    module_name, _, class_name = seam.owner.partition(":")
    owner: Any = importlib.import_module(module_name)
    for part in filter(None, class_name.split(".")):
        owner = inspect.getattr_static(owner, part)
    return owner


def _hook(seam: Seam) -> Callable[..., Any]:
    module_name, _, name = seam.hook.partition(":")
    hook: Callable[..., Any] = inspect.getattr_static(importlib.import_module(module_name), name)
    return hook


def _inspect(seam: Seam, owner: Any) -> SeamRow:
    is_installed = seam in _INSTALLED.originals
    try:
        attribute = _INSTALLED.originals[seam][0] if is_installed else inspect.getattr_static(owner, seam.name)
    except AttributeError:
        return SeamRow(seam=seam, is_installed=False, matches=False, found_signature=None)
    # An inherited attribute could not be restored by assignment.
    is_own = isinstance(owner, ModuleType) or seam.name in vars(owner)
    found = _signature(_function(attribute))
    return SeamRow(
        seam=seam,
        is_installed=is_installed,
        matches=is_own and _fits(wanted=seam.signature, found=found),
        found_signature=found,
    )


def _function(attribute: Any) -> Callable[..., Any]:
    match attribute:
        case property(fget=getter) if getter is not None:
            return getter  # type: ignore[no-any-return]
        case staticmethod() | classmethod():
            return attribute.__func__
        case _:
            return attribute  # type: ignore[no-any-return]


def _signature(function: Callable[..., Any]) -> str:
    if isinstance(function, ClassMethodDescriptorType):  # a class method in C has no signature and takes anything
        return "(cls, *args, **kwargs)"
    marks: dict[object, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    parameters = inspect.signature(function).parameters.values()
    return "(" + ", ".join(marks.get(parameter.kind, "") + parameter.name for parameter in parameters) + ")"


def _fits(*, wanted: str, found: str) -> bool:
    if not wanted.endswith(", ...)"):
        return wanted == found
    start = wanted.removesuffix(", ...)")
    return found == start + ")" or found.startswith(start + ", ")


def _wrapped(original: Any, hook: Callable[..., Any]) -> Any:
    function = _function(original)

    @functools.wraps(function)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return hook(function, *args, **kwargs)

    match original:
        case property():
            return property(replacement, original.fset, original.fdel, original.__doc__)
        case staticmethod():
            return staticmethod(replacement)
        case classmethod() | ClassMethodDescriptorType():
            return classmethod(replacement)
        case _:
            return replacement


def _mismatch(row: SeamRow) -> PfeifeError:
    found = "no such attribute" if row.found_signature is None else row.found_signature
    return PfeifeError(
        id="PF110",
        what=f"{row.seam.owner}.{row.seam.name} is not what we know: expected {row.seam.signature}, found {found}",
        where=row.seam.owner,
        why="replacing a function that has changed would go wrong later, and silently",
        hints=(f"use versions known to work: {KNOWN_VERSIONS}", "see the whole table: pfeife doctor"),
    )
