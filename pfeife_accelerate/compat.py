"""Every private name of torch and accelerate that the package touches: one small function each.

Models: the versions each name is known to work with, and why no public name does.
Ignores: everything public; use that directly.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import sympy
import torch
import torch.distributed as dist
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # there is no public fake tensor API
from torch.amp.autocast_mode import _enter_autocast as AUTOCAST_ENTER  # node targets in Dynamo's graphs
from torch.amp.autocast_mode import _exit_autocast as AUTOCAST_EXIT
from torch.autograd.function import BackwardCFunction  # what a custom Function leaves as `grad_fn`
from torch.distributed import distributed_c10d
from torch.utils import _pytree as pytree  # documented for exporters, not public; stable since torch 2.2
from torch.utils._python_dispatch import TorchDispatchMode  # documented in the dispatcher's notes only

from pfeife_accelerate.compat_logging import quiet_dynamo
from pfeife_accelerate.errors import PfeifeError

# Names that other files import from here; the functions below need no listing.
__all__ = [
    "AUTOCAST_ENTER",
    "AUTOCAST_EXIT",
    "BackwardCFunction",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "TorchDispatchMode",
    "pytree",
]

# ---------------------------------------------------------------------------------------------------------------------
# Process groups and process state
# ---------------------------------------------------------------------------------------------------------------------


def set_default_process_group(group: dist.ProcessGroup) -> None:
    """Make `group` the one that calls without a group use; `get_rank()` and `get_world_size()` follow.

    torch 2.10 - 2.14: `distributed_c10d._update_default_pg`. There is no public way to change the default group, and
    a script's own collectives must see pipelines, not ranks.
    """
    distributed_c10d._update_default_pg(group)


def set_group_ranks(group: dist.ProcessGroup, group_rank_of: Mapping[int, int]) -> None:
    """Say which rank of the default group is which rank of `group`.

    torch 2.10 - 2.14: `distributed_c10d._world.pg_group_ranks`, filled when a group is made. After the default group
    has changed, the old numbers mean other processes: `get_rank(group)` would look up the wrong one.
    """
    distributed_c10d._world.pg_group_ranks[group] = dict(group_rank_of)


def default_store() -> dist.Store:
    """The key-value store that the default process group was made with.

    torch 2.10 - 2.14: `distributed_c10d._get_default_store`; a group does not publish its store.
    """
    return distributed_c10d._get_default_store()


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """How long a gloo group waits for a peer.

    torch 2.10 - 2.14: `options._timeout` of the group's backend; a group does not publish the time it was made with.
    """
    timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return timeout


def process_state_is_made() -> bool:
    """Whether accelerate's `PartialState` has been initialised in this process.

    accelerate 1.10 - 1.15: `PartialState._shared_state`; the public property needs an instance, and making one
    initialises it.
    """
    from accelerate.state import PartialState

    return bool(PartialState._shared_state)


def update_process_state(facts: Mapping[str, Any]) -> None:
    """Change what accelerate knows of this process (`num_processes`, `process_index`, `distributed_type`).

    accelerate 1.10 - 1.15: `PartialState._shared_state`, and `AcceleratorState._shared_state` which is a copy of it
    once an `Accelerator` exists. Instances share these dictionaries, so all of them follow.
    """
    from accelerate.state import AcceleratorState, PartialState

    PartialState._shared_state.update(facts)
    if AcceleratorState._shared_state:
        AcceleratorState._shared_state.update(facts)


# ---------------------------------------------------------------------------------------------------------------------
# Capture
# ---------------------------------------------------------------------------------------------------------------------

SET_GRAD_ENABLED = torch._C._set_grad_enabled
"""Node target of `torch.no_grad` regions in Dynamo's graphs (torch 2.0 to 2.14)."""

LOG_API_USAGE = torch._C._log_api_usage_once
"""Node target of torch's API usage logging, which Dynamo records as an operation (torch 2.9 to 2.14)."""

CHECKPOINTED = torch.ops.higher_order.tag_activation_checkpoint
"""Node target of `torch.utils.checkpoint.checkpoint` in Dynamo's graphs (torch 2.1 to 2.14)."""


def checkpoint_context_of(body: torch.fx.GraphModule) -> Any:
    """The `context_fn` that a checkpointed region was given, or None.

    torch 2.4 - 2.14: Dynamo leaves it in the meta of the region's graph under this key.
    """
    return body.meta.get("_checkpoint_context_fn")


def expression_of(size: Any) -> Any:
    """The sympy expression of a symbolic size, with merged symbols replaced (torch 2.1 to 2.14); an int as it is."""
    return size.node.expr if isinstance(size, (torch.SymInt, torch.SymFloat)) else sympy.Integer(int(size))


def state_holders(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The module's own parameter and buffer dictionaries: assigning through the module would register again."""
    return module._parameters, module._buffers


def under_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor behind what `torch.vmap` and its kin show to the function they run (torch 2.1 to 2.14); or itself."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def storage_id(tensor: torch.Tensor) -> int:
    """A number that two tensors share exactly if they share their storage; works for fake tensors too."""
    return under_transforms(tensor).untyped_storage()._cdata


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether anything was registered by `register_hook` or `register_post_accumulate_grad_hook`.

    torch 2.1 - 2.14: `Tensor._backward_hooks` and `Tensor._post_accumulate_grad_hooks`; None or empty without hooks.
    """
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def is_accumulated(node: Any) -> bool | None:
    """Within a backward: whether it adds to the `.grad` of the leaf that this node (`AccumulateGrad`) stands for.

    None where `torch.autograd.grad` wants the leaf's gradient for itself (torch 2.0 - 2.14: that raises).
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return None


def mark_batch_dynamic(tensor: torch.Tensor, dim: int = 0) -> None:
    """Ask Dynamo for a symbolic size in a dimension unless the code fixes it (torch 2.1 to 2.14)."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def mark_dynamic(tensor: torch.Tensor, dims: list[int]) -> None:
    """Ask Dynamo for symbolic sizes in some dimensions unless the code fixes them (torch 2.1 to 2.14)."""
    torch._dynamo.maybe_mark_dynamic(tensor, dims)


def dynamic_dims(tensor: torch.Tensor) -> list[int]:
    """The dimensions marked by the functions above (torch 2.1 to 2.14)."""
    return sorted(vars(tensor).get("_dynamo_weak_dynamic_indices", ()))


_LOGGING = ("debug", "info", "warn", "error", "exception", "critical", "fatal", "log")


@contextmanager
def dynamo_limits(recompilations: int) -> Iterator[None]:
    """Dynamo may capture a function that often (a new length or mode is one more capture each), without giving up on
    bookkeeping: messages of loggers, and `requires_grad = True` or `requires_grad_()` on a value made in forward.

    A float is a constant of its capture, also where it has differed between captures: a symbol for it would be a
    value that exists at run time alone.

    One more raises (see `is_capture_limit`); without that, Dynamo would run the function on the fakes, uncaptured.

    torch 2.1 - 2.14 for the options and `TensorVariable.call_method`; torch 2.14 for
    `SetAttrBuiltinVariable._call_setattr`, without which the graph breaks. transformers sets the flag so that reentrant
    checkpointing finds an input that requires gradients (T5, wav2vec, any model with frozen embeddings); nobody reads
    these gradients.
    """
    methods = vars(logging.Logger).items()
    messages = {method for name, method in methods if callable(method) and name.startswith(_LOGGING)}
    options = torch._dynamo.config.patch(
        recompile_limit=recompilations,
        accumulated_recompile_limit=max(recompilations, 256),
        fail_on_recompile_limit_hit=True,
        suppress_errors=False,
        ignore_logger_methods=messages,
        specialize_float=True,
    )
    with quiet_dynamo(), options, _requires_grad_passed_over():
        yield


@contextmanager
def compiler_limits(variants: int) -> Iterator[None]:
    """Dynamo may compile a function that often; one more raises, and so does what a backend cannot do.

    torch 2.10 - 2.14: by default the ninth variant, and everything after it, runs uncompiled without a word.
    """
    options = torch._dynamo.config.patch(
        recompile_limit=variants,
        accumulated_recompile_limit=max(variants, 256),
        fail_on_recompile_limit_hit=True,
        suppress_errors=False,
    )
    with options:
        yield


def is_compiler_error(error: Exception) -> bool:
    """Whether Dynamo or a backend behind it gave up, rather than the compiled code (torch 2.0 to 2.14)."""
    return isinstance(error, torch._dynamo.exc.TorchDynamoException) or is_capture_limit(error)


@contextmanager
def _requires_grad_passed_over() -> Iterator[None]:
    builtin, tensor = torch._dynamo.variables.builtin, torch._dynamo.variables.TensorVariable
    setting = vars(builtin).get("SetAttrBuiltinVariable")
    call_method, set_attribute = tensor.call_method, setting and setting._call_setattr

    def pass_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        is_on = name == "requires_grad_" and all(
            given.is_python_constant() and given.as_python_constant() for given in (*args, *kwargs.values())
        )
        return self if self.source is None and is_on else call_method(self, tx, name, args, kwargs)

    def pass_attribute(self: Any, tx: Any, obj: Any, name: Any, value: Any) -> Any:
        is_made_here = obj.is_tensor() and obj.source is None
        if is_made_here and name.is_python_constant() and name.as_python_constant() == "requires_grad":
            return value
        return set_attribute(self, tx, obj, name, value)

    tensor.call_method = pass_method
    if setting is not None:
        setting._call_setattr = pass_attribute
    try:
        yield
    finally:
        tensor.call_method = call_method
        if setting is not None:
            setting._call_setattr = set_attribute


def fake_input(mode: FakeTensorMode, tensor: torch.Tensor, open_dims: Collection[int], name: str) -> torch.Tensor:
    """A fake of `tensor` with a symbolic size of its own in each of `open_dims` (torch 2.2 to 2.14)."""
    from torch._dynamo.source import ConstantSource  # these load all of Dynamo
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    dims = range(tensor.dim())
    kinds = [DimDynamic.DYNAMIC if d in open_dims and tensor.shape[d] > 1 else DimDynamic.STATIC for d in dims]
    context = StatelessSymbolicContext(dynamic_sizes=kinds)
    return mode.from_tensor(tensor, source=ConstantSource(name), symbolic_context=context)


def symbolic_number(mode: FakeTensorMode, value: int, name: str) -> Any:
    """A symbolic number that stands for `value` (torch 2.2 to 2.14)."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = ConstantSource(name)
    symbol = mode.shape_env.create_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    return mode.shape_env.create_symintnode(symbol, hint=value, source=source)


def not_a_frame(function: Any) -> None:
    """Tell Dynamo not to capture a function by itself; it is still traced as a part of others.

    torch 2.1 - 2.14: `torch._dynamo.eval_frame.skip_code`; `torch.compiler.disable` would end the graph of a caller.
    """
    torch._dynamo.eval_frame.skip_code(function.__code__)


def is_capture_limit(error: BaseException | None) -> bool:
    """Whether Dynamo was asked for one capture too many (torch 2.6 to 2.14: `FailOnRecompileLimitHit`)."""
    return isinstance(error, torch._dynamo.exc.FailOnRecompileLimitHit)


def reads_values(error: BaseException) -> bool:
    """Whether an error says that the value of a fake tensor was asked for (torch 2.2 to 2.14)."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    return isinstance(error, DataDependentOutputException | DynamicOutputShapeException)


def disable_torch_function() -> Any:
    """Context in which tensor subclasses are treated as plain tensors (torch 1.13 to 2.14)."""
    return torch._C.DisableTorchFunctionSubclass()


def transform_is_active() -> bool:
    """Whether a function is running under `torch.vmap`, `torch.func.grad` or their kin (torch 2.0 to 2.14)."""
    return bool(torch._C._are_functorch_transforms_active())


def make_wrapper(cls: type, like: torch.Tensor) -> Any:
    """A tensor of subclass `cls` without storage that reports `like`'s metadata (torch 1.11 to 2.14)."""
    return torch.Tensor._make_wrapper_subclass(
        cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device, requires_grad=like.requires_grad
    )


def num_graph_breaks() -> int:
    """How many graph breaks Dynamo has noted in this process: see `graph_break_reasons`."""
    return len(torch._dynamo.utils.graph_break_reasons)


def graph_break_reasons(since: int = 0) -> list[str]:
    """Where and why Dynamo had to break graphs in this process, latest first; without the first `since`.

    torch 2.1 - 2.14: `torch._dynamo.utils.graph_break_reasons`; the public counters name no source line.
    """
    found = []
    for broken in reversed(torch._dynamo.utils.graph_break_reasons[since:]):
        reason = (str(broken.reason).strip() or "graph break").splitlines()[0]
        # Where the model's Python runs under our own function mode, the innermost frame is ours.
        stack = [frame for frame in broken.user_stack if "pfeife_accelerate" not in frame.filename]
        place = stack[-1] if stack else None
        found.append(reason if place is None else f"{place.filename}:{place.lineno}: {place.line} ({reason})")
    return list(dict.fromkeys(found))


def schema_of(operator: OpOverload) -> Any:
    """An ATen operator's schema: names, defaults and aliasing of its arguments (torch 1.12 to 2.14)."""
    return operator._schema


# ---------------------------------------------------------------------------------------------------------------------
# Random numbers
# ---------------------------------------------------------------------------------------------------------------------

_STATE_BYTES, _BEFORE_WORDS, _NUM_WORDS = 5056, 3, 624


def generator_words(generator: torch.Generator) -> torch.Tensor:
    """The 624 words of a CPU generator's Mersenne Twister, with the two numbers that say how far it has come last.

    torch 1.6 - 2.14: a state is the seed, two numbers, the words, each in 64 bits, and numbers already drawn in pairs.
    """
    state = _checked(generator.get_state()).view(torch.int64)
    return torch.cat([state[_BEFORE_WORDS : _BEFORE_WORDS + _NUM_WORDS], state[1:_BEFORE_WORDS]])


def set_generator_words(generator: torch.Generator, words: torch.Tensor) -> None:
    """Change the words; `words` is as `generator_words` gives it, and the rest of the state stays."""
    state = _checked(generator.get_state())
    state.view(torch.int64)[_BEFORE_WORDS : _BEFORE_WORDS + _NUM_WORDS] = words[:_NUM_WORDS]
    generator.set_state(state)


def _checked(state: torch.Tensor) -> torch.Tensor:
    if state.numel() != _STATE_BYTES:
        raise PfeifeError(
            id="PF450",
            what=f"the CPU generator's state has {state.numel()} bytes, not {_STATE_BYTES}",
            where=f"torch {torch.__version__}",
            why="the seeds of model calls are taken from a state of known form",
            hints=("use a version known to work: torch 2.10 - 2.14",),
        )
    return state


def is_converting_a_module() -> bool:
    """Whether the call under way comes from `Module.to`, `.half()` and their kin, which put its result into `.data`.

    torch 1.5 - 2.14: `Module._apply`, whose function gets one parameter after the other and is not told for what.
    """
    frame = sys._getframe(1)
    for _ in range(8):
        if frame is None or frame.f_code is torch.nn.Module._apply.__code__:
            return frame is not None
        frame = frame.f_back  # type: ignore[assignment]
    return False
