"""A model that cannot be captured: every rank runs it whole, by itself, in eager mode.

All ranks of a pipeline run the same script on the same data with the same generators, so each of them computes what one
process would: exact, with the whole state everywhere, and no faster. Models: the decision, alike on all ranks of the
launch; whether the model fits; the mean gradient over pipelines; copies that drift apart. Ignores: making it faster.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pfeife_accelerate.capture.failure import CaptureFailure
from pfeife_accelerate.capture.inputs import values
from pfeife_accelerate.capture.model_capture import CapturedCall
from pfeife_accelerate.capture.structure import map_tensors
from pfeife_accelerate.config import process_variable
from pfeife_accelerate.cost.hardware import memory_bytes
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.log import get_logger, warn_once
from pfeife_accelerate.session.copies import CopyCheck

if TYPE_CHECKING:
    from pfeife_accelerate.session.model import PipelinedModel

_LOG = get_logger(__name__)
_MOMENTS = 2
_REASON_BYTES = 2048


class CaptureGate:
    """Stands between a model's calls and their capture: calls that cannot be captured are run here."""

    def __init__(self, model: PipelinedModel) -> None:
        self._model = model
        self._whole: WholeCopy | None = None
        self._failure: CaptureFailure | None = None

    @property
    def is_open(self) -> bool:
        """Whether calls are not captured, since that has failed."""
        return self._whole is not None

    def capture(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        precision: tuple[str, torch.dtype] | None,
        *,
        training: bool,
    ) -> CapturedCall | None:
        """The captured call, or None: then `run` gives the call's outputs.

        Raises: PfeifeError PF510 where running the model whole is not wanted, or no longer possible.
        """
        if self._whole is not None:
            return None
        captured, self._failure = None, None
        try:
            captured = self._model.capture.call(args, kwargs, precision)
        except CaptureFailure as failure:
            if self._model.session.plugin.on_capture_failure == "error":
                raise (failure.refusal if failure.has_begun or failure.cause is None else failure.cause) from failure
            self._failure = failure
        if captured is not None and self._model.session.mesh.world_rank == 0:
            for doubt in captured.doubts:
                warn_once(_LOG, re.sub(r"\d+", "", doubt), doubt)  # once, whatever the sizes
        if self._model.plan is None:
            reason = self._agree(None if self._failure is None else str(self._failure))
            if reason is not None:
                if captured is not None:
                    self._model.capture.undo()
                self._whole = WholeCopy(self._model, reason)
                return None
        elif self._failure is not None and training:
            raise _too_late(self._failure) from self._failure
        return captured

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The outputs of a call that was not captured."""
        if self._whole is not None:
            return self._whole(args, kwargs)
        from pfeife_accelerate.session.whole import whole_module  # that module is about models, this is one

        assert self._failure is not None
        if self._model.session.mesh.world_rank == 0:
            warn_once(_LOG, "evaluation", f"an evaluation is run on the whole model: {self._failure}")
        args, kwargs = values(args, kwargs)
        with whole_module(self._model):
            return _run_eagerly(self._model, self._model.capture.original_forward, args, kwargs)

    def _agree(self, reason: str | None) -> str | None:
        """What kept some rank of the launch from capturing the first call, on all ranks; None if all have."""
        group = self._model.session.mesh.world_control_group
        data = torch.zeros(_REASON_BYTES, dtype=torch.uint8)
        words = (reason or "").encode()[:_REASON_BYTES]
        data[: len(words)] = torch.tensor(list(words), dtype=torch.uint8)
        found = [torch.zeros_like(data) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, data, group=group)
        texts = [bytes(one.tolist()).rstrip(b"\0").decode(errors="ignore") for one in found]
        return next((text for text in texts if text), None)


class WholeCopy:
    """The whole model on this rank."""

    def __init__(self, model: PipelinedModel, reason: str) -> None:
        self._model = model
        self._reason = reason
        self._is_told = False
        self._shell = _Shell(model.module, model.capture.original_forward)
        self._replicated: DistributedDataParallel | None = None
        self._replicated_for: tuple[bool, ...] = ()
        self._check = CopyCheck(model)
        self._refuse_if_too_large()
        self._place()

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call, as a single process would."""
        args, kwargs = values(args, kwargs)
        training = torch.is_grad_enabled() and any(p.requires_grad for p in self._model.module.parameters())
        if training:
            self._check.next_call(args, kwargs)
        outputs = _run_eagerly(self._model, self._runner(training=training), args, kwargs)
        self._tell()
        return outputs

    def _runner(self, *, training: bool) -> Callable[..., Any]:
        session = self._model.session
        if not training or session.mesh.num_pipelines == 1:
            return self._model.capture.original_forward
        wanted = tuple(p.requires_grad for p in self._shell.parameters())
        if self._replicated is None or wanted != self._replicated_for:
            group = session.mesh.replica_group
            # Control flow may leave parameters out that another pipeline uses.
            self._replicated = DistributedDataParallel(self._shell, process_group=group, find_unused_parameters=True)
            self._replicated_for = wanted
        replicated = self._replicated
        synchronises = self._model.synchronises and session.synchronises()

        def run(*args: Any, **kwargs: Any) -> Any:
            with nullcontext() if synchronises else replicated.no_sync():
                return replicated(*args, **kwargs)

        return run

    def _place(self) -> None:
        device = self._model.device
        with torch.no_grad():
            for tensor in _states(self._model.module):
                if tensor.device != device:
                    tensor.data = tensor.data.to(device)
        for module in self._model.module.modules():
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()

    def _refuse_if_too_large(self) -> None:
        model = self._model
        needed = bytes_to_train(model.module, on_device=model.device)
        available = memory_bytes(model.device)
        if model.device.type != "cuda":
            available //= int(process_variable("LOCAL_WORLD_SIZE") or 1)
        if needed > available:
            raise PfeifeError(
                id="PF530",
                what=f"{type(model.module).__name__} cannot be captured, and does not fit into one process: "
                f"{needed - available:,} bytes are missing",
                where=f"parameters, gradients and {_MOMENTS} optimizer moments: {needed:,} bytes; "
                f"memory for this process: {available:,} bytes",
                why=self._reason,
                hints=("change the named line so that the model can be captured", "use a smaller model"),
            )

    def _tell(self) -> None:
        """Once, when a first call has worked: an error in the model itself is not about the capture."""
        if self._is_told:
            return
        self._is_told = True
        if self._model.session.mesh.world_rank == 0:
            _LOG.warning(
                "%s is not pipelined: every process of a pipeline trains the whole model by itself, which gives what "
                "one process would give, and is no faster. It was not captured:\n%s\n  or     on_capture_failure: "
                "error, to refuse such a model",
                type(self._model.module).__name__,
                self._reason,
            )


class _Shell(nn.Module):
    """The model with its own forward, for DistributedDataParallel."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self._plain_forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module did before it was prepared."""
        return self._plain_forward(*args, **kwargs)


def bytes_to_train(module: nn.Module, on_device: torch.device) -> int:
    """Bytes that training the module by Adam needs on the device, beside what lies there already."""
    total = 0
    for tensor in _states(module):
        size = tensor.numel() * tensor.element_size()
        total += size if tensor.device != on_device else 0
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            total += size * (1 + _MOMENTS)
    return total


def _states(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _run_eagerly(
    model: PipelinedModel, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if model.autocast is None:
        return forward(*args, **kwargs)
    with torch.autocast(*model.autocast):
        outputs = forward(*args, **kwargs)
    return map_tensors(lambda t: t.float() if t.dtype in (torch.float16, torch.bfloat16) else t, outputs)


def _too_late(failure: CaptureFailure) -> PfeifeError:
    refusal = failure.refusal
    return PfeifeError(
        id="PF510",
        what=f"{refusal.what}: earlier calls could be, and the parameters have been distributed since",
        where=refusal.where,
        why=refusal.why,
        hints=(*refusal.hints, "let the first call of the model take the branch that cannot be captured"),
    )
