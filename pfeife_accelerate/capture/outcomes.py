"""What a torch function would return for deferred arguments: worked out on fake tensors, once for each kind of call.

Two calls are of one kind if the function, the modes and all plain arguments are equal and the tensors have equal
metadata. A script's loss makes the same calls at every step, and a fake operation costs ten times what looking it up
does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from pfeife_accelerate.capture import torch_functions as known
from pfeife_accelerate.capture.elsewhere import ParameterElsewhere
from pfeife_accelerate.capture.torch_functions import mapped
from pfeife_accelerate.compat import FakeTensor, FakeTensorMode, pytree, storage_id

_USUAL = (torch.Tensor, torch.nn.Parameter, FakeTensor, ParameterElsewhere)


@dataclass(frozen=True)
class Metadata:
    """All that is known of a tensor without its data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> Metadata | None:
        """A tensor's metadata; None if it is of a kind that has more than this."""
        if type(tensor) not in _USUAL or tensor.layout is not torch.strided:
            return None
        if tensor.is_conj() or tensor.is_neg():
            return None
        shape, stride = tuple(tensor.shape), tensor.stride()
        return Metadata(shape, stride, tensor.dtype, tensor.device, tensor.requires_grad)


class _Fakes(FakeTensorMode):  # type: ignore[misc]
    """Fake tensors; notices operations that would draw random numbers."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.drew: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            self.drew.add(str(func).split(".")[1])
        return super().__torch_dispatch__(func, types, args, kwargs)


FAKE_MODE = _Fakes()


def new_fake(metadata: Metadata) -> torch.Tensor:
    """A fake tensor that no other shares its memory with."""
    with FAKE_MODE, torch.no_grad():
        fake = torch.empty_strided(metadata.shape, metadata.stride, dtype=metadata.dtype, device=metadata.device)
    return fake.requires_grad_(metadata.requires_grad)


shared_fake = functools.lru_cache(maxsize=4096)(new_fake)
"""The one fake tensor that stands for all tensors with this metadata; it is never changed."""


@dataclass(frozen=True)
class Result:
    """One result of a call: argument `own` itself, a new tensor (`viewed`: in the memory of that argument), or a value.

    Arguments are counted among the call's tensors, deferred and real, in order.
    """

    value: Any = None
    own: int | None = None
    fake: torch.Tensor | None = None
    viewed: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What a call would return: the results in the order of `structure`, and whether it draws random numbers."""

    results: tuple[Result, ...]
    structure: Any
    draws: bool = False

    @property
    def has_tensors(self) -> bool:
        """Whether the call returns any new tensor or argument."""
        return any(r.fake is not None or r.own is not None for r in self.results)


class NeedsData(Exception):
    """The shapes of the results depend on data, or the call is wrong: only a real run can tell."""


_KNOWN: dict[Hashable, Outcome] = {}
_KNOWN_LIMIT = 4096
_DRAWS_AS_MANY_AS_THE_DATA_SAY = frozenset(
    ("rrelu_with_noise", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet", "multinomial")
)


def outcome_of(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], metadata: list[Metadata | torch.Tensor]
) -> Outcome:
    """What a call returns whose tensors, in order, have this metadata, or are unusual and like this fake tensor.

    Raises: NeedsData if that cannot be known without data.
    """
    key = _key(func, args, kwargs, metadata)
    if key is not None and key in _KNOWN:
        return _KNOWN[key]
    outcome = _work_out(func, args, kwargs, metadata)
    if key is not None and all(r.fake is None or Metadata.of(r.fake) is not None for r in outcome.results):
        if len(_KNOWN) >= _KNOWN_LIMIT:
            _KNOWN.clear()
        _KNOWN[key] = outcome
    return outcome


def _key(func: Any, args: Any, kwargs: Any, metadata: list[Metadata | torch.Tensor]) -> Hashable | None:
    if not all(isinstance(m, Metadata) for m in metadata):
        return None
    devices = sorted({m.device.type for m in metadata})
    autocast = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices]
    modes = torch.is_grad_enabled(), *autocast
    try:
        told = known.telling((args, kwargs), _raise_unknown, lambda tensor: "tensor")
        key = func, told, tuple(metadata), modes, torch.get_default_dtype()
        hash(key)
    except (TypeError, _Unknown):
        return None
    return key


class _Unknown(Exception):
    pass


def _raise_unknown(item: Any) -> Hashable:
    raise _Unknown


def _work_out(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], metadata: list[Metadata | torch.Tensor]
) -> Outcome:
    twins: list[torch.Tensor] = []

    def twin_of(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        own = metadata[len(twins)]
        twin = shared_fake(own) if isinstance(own, Metadata) else own
        if isinstance(own, Metadata) and any(twin is other for other in twins):  # twins must be told apart
            twin = new_fake(own)
        twins.append(twin)
        return twin

    twin_args, twin_kwargs = mapped((args, kwargs), twin_of)
    versions = [twin._version for twin in twins]
    FAKE_MODE.drew.clear()
    try:
        with FAKE_MODE:
            made = func(*twin_args, **twin_kwargs)
    except (RuntimeError, NotImplementedError) as error:
        raise NeedsData from error
    if versions != [twin._version for twin in twins]:
        raise ChangesItsArgument
    if FAKE_MODE.drew & _DRAWS_AS_MANY_AS_THE_DATA_SAY:
        raise NeedsData
    leaves, structure = pytree.tree_flatten(made)
    return Outcome(tuple(_result(leaf, twins) for leaf in leaves), structure, bool(FAKE_MODE.drew))


class ChangesItsArgument(Exception):
    """The call changes an argument, which its name does not tell."""


def _result(leaf: Any, twins: list[torch.Tensor]) -> Result:
    if not isinstance(leaf, torch.Tensor):
        return Result(value=leaf)
    for position, twin in enumerate(twins):
        if twin is leaf:
            return Result(own=position)
    memory = storage_id(leaf) if leaf.layout is torch.strided else None
    viewed = [i for i, twin in enumerate(twins) if twin.layout is torch.strided and storage_id(twin) == memory]
    metadata = Metadata.of(leaf)
    fake = leaf.detach().requires_grad_(leaf.requires_grad) if metadata is None else shared_fake(metadata)
    return Result(fake=fake, viewed=viewed[0] if viewed else None)


def fake_twin(tensor: torch.Tensor) -> torch.Tensor:
    """A fake tensor for a real one of an unusual kind."""
    return FAKE_MODE.from_tensor(tensor, static_shapes=True)
