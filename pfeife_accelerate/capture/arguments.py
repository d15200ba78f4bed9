"""Which tensors of a call carry the batch, and in which dimension.

The rules, in this order:

1. Numbers, strings, None and tensors without dimensions have no batch. Tensors are found in tuples, lists and
   dictionaries, however deep, and are called by the argument's name and the keys that lead to them: `conditions.mask`.
2. What the option `batch_dims` says of an argument, by name or by position, holds. It gives the batch size.
3. Without it, the batch size is the most frequent size of dimension 0; of equally frequent ones the first argument's,
   and a warning says so.
4. An argument that is not declared carries the batch in dimension 0 if that has the batch size, in this call and in
   all calls before: a table of eight class weights is given away by a batch of seven.
5. What the capture shows overrules 4: where the model's code fixes the size, it is no batch. An argument of one
   dimension whose size nothing in the model ties to the other arguments is in doubt, and a warning says so.
6. Arguments whose sizes the model's code leaves open, each by itself, are told to have equally many rows where the
   batch could not be divided otherwise, and can be then. Arguments in doubt are not.

Ignores: what rows mean to the model; `graph` sees which operations mix them.
"""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from pfeife_accelerate.capture.graph import CapturedGraph
from pfeife_accelerate.capture.sizes import symbols_of
from pfeife_accelerate.compat import mark_batch_dynamic, pytree
from pfeife_accelerate.errors import PfeifeError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class CallArguments:
    """One call's arguments, ready for Dynamo. `batch_dims` and `names` know their tensors by `id`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int
    batch_dims: Mapping[int, int]
    names: Mapping[int, str]
    doubt: str | None = None
    tied_names: frozenset[str] = frozenset()

    @property
    def tied(self) -> tuple[tuple[torch.Tensor, ...], ...]:
        """The tensors that are to have equally many rows, by the dimension that counts them."""
        found: dict[int, dict[int, torch.Tensor]] = {}
        for leaf in pytree.tree_leaves((self.args, self.kwargs)):
            dim = self.batch_dims.get(id(leaf))
            if dim is not None and self.names[id(leaf)] in self.tied_names:
                found.setdefault(dim, {})[id(leaf)] = leaf
        return tuple(tuple(found.get(dim, {}).values()) for dim in range(max(found, default=-1) + 1))

    def with_tied(self, names: frozenset[str]) -> CallArguments:
        """The same call with these arguments tied as well."""
        return replace(self, tied_names=self.tied_names | names)

    def with_more_rows(self) -> CallArguments:
        """The same call with the last row of each batch repeated, to a number that is no other size."""
        leaves = [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor)]
        sizes = {size for leaf in leaves for size in leaf.shape}
        rows = next(rows for rows in itertools.count(self.rows + 1) if rows not in sizes)
        made: dict[int, torch.Tensor] = {}

        def longer(item: Any) -> Any:
            dim = self.batch_dims.get(id(item))
            if dim is None:
                return item
            if id(item) not in made:
                last = item.narrow(dim, self.rows - 1, 1)
                made[id(item)] = torch.cat([item, *[last] * (rows - self.rows)], dim)
                mark_batch_dynamic(made[id(item)], dim)
            return made[id(item)]

        args, kwargs = pytree.tree_map(longer, (self.args, self.kwargs))
        dims = {id(made[key]): dim for key, dim in self.batch_dims.items() if key in made}
        names = {id(made[key]): name for key, name in self.names.items() if key in made}
        return CallArguments(
            args=args, kwargs=kwargs, rows=rows, batch_dims=dims, names=names, tied_names=self.tied_names
        )


@dataclass(frozen=True, kw_only=True)
class _Named:
    tensor: torch.Tensor
    name: str
    position: str | None


@dataclass(frozen=True, kw_only=True)
class _Carrier:
    """An argument that carries the batch in a graph, and the symbols of its number of rows."""

    argument: torch.Tensor
    name: str
    symbols: frozenset[Any]
    is_in_doubt: bool


def _carriers(given: CallArguments, graph: CapturedGraph, arguments: tuple[Any, ...]) -> tuple[_Carrier, ...]:
    found = {
        id(argument): (argument, symbols_of(placeholder.example.shape[given.batch_dims[id(argument)]]))
        for placeholder in graph.placeholders
        if id(argument := arguments[placeholder.index]) in given.batch_dims
    }
    carriers: list[_Carrier] = []
    for key, (argument, symbols) in found.items():
        others = [theirs for other, (_, theirs) in found.items() if other != key]
        is_alone = bool(symbols and others) and not any(symbols & theirs for theirs in others)
        doubtful = argument.dim() == 1 and is_alone
        carriers.append(_Carrier(argument=argument, name=given.names[key], symbols=symbols, is_in_doubt=doubtful))
    return tuple(carriers)


def doubts(given: CallArguments, graph: CapturedGraph, arguments: tuple[Any, ...]) -> tuple[str, ...]:
    """What is assumed of the batch in this call, and how to say it otherwise, where rule 3 or 5 is in doubt."""
    how = ". To say it otherwise, set the option batch_dims: {name: dimension, or none}"
    found = [] if given.doubt is None else [given.doubt + how]
    if graph.refusal is None:
        found += [
            f"it is assumed that {carrier.name!r} (shape {tuple(carrier.argument.shape)}) has a value for each row "
            f"of the batch: nothing in the model ties it to the other arguments{how}"
            for carrier in _carriers(given, graph, arguments)
            if carrier.is_in_doubt
        ]
    return tuple(found)


def open_sizes(given: CallArguments, graph: CapturedGraph, arguments: tuple[Any, ...]) -> frozenset[str]:
    """The arguments to tie by rule 6; none if that would change nothing."""
    if graph.refusal is None:
        return frozenset()
    carriers = [
        carrier for carrier in _carriers(given, graph, arguments) if carrier.symbols and not carrier.is_in_doubt
    ]
    are_several = len({carrier.symbols for carrier in carriers}) > 1
    return frozenset(carrier.name for carrier in carriers) if are_several else frozenset()


class BatchRules:
    """The rules applied to the calls of one model; they remember which arguments turned out to have no batch."""

    def __init__(self, forward: Callable[..., Any], declared: tuple[tuple[str, int | None], ...]) -> None:
        self._declared = dict(declared)
        self._parameters = _parameters_of(forward)
        self._without: set[str] = set()
        self._tied: frozenset[str] = frozenset()
        self._in_vain: set[frozenset[str]] = set()
        self._refuse_unknown()

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
        """This call's arguments, marked for Dynamo. They are aliases: the script's own tensors are left unmarked.

        Raises: PfeifeError PF532 or PF533 for declared dimensions that do not fit.
        """
        args, kwargs = _aliases(args, kwargs)
        found = list(self._tensors(args, kwargs))
        dims: dict[int, int] = {}
        open_ones: list[_Named] = []
        for one in found:
            if (key := self._declared_as(one)) is None:
                open_ones.append(one)
            elif (dim := self._declared[key]) is not None:
                dims[id(one.tensor)] = _checked(one, dim)
        rows, doubt = self._rows(found, dims, open_ones)
        for one in open_ones:
            if one.tensor.dim() == 0 or one.name in self._without:
                continue
            if one.tensor.shape[0] == rows:
                dims[id(one.tensor)] = 0
            else:
                self._without.add(one.name)
        if rows > 1:
            for one in found:
                if id(one.tensor) in dims:
                    mark_batch_dynamic(one.tensor, dims[id(one.tensor)])
        names = {id(one.tensor): one.name for one in found}
        return CallArguments(
            args=args, kwargs=kwargs, rows=rows, batch_dims=dims, names=names, doubt=doubt, tied_names=self._tied
        )

    def untried(self, names: frozenset[str]) -> frozenset[str]:
        """These arguments if tying them (rule 6) has not been tried, else none."""
        return frozenset() if names in self._in_vain else names

    def tried(self, names: frozenset[str], *, helps: bool) -> bool:
        """Remember whether tying these arguments makes the batch divisible."""
        if helps:
            self._tied |= names
        else:
            self._in_vain.add(names)
        return helps

    def _rows(self, found: list[_Named], dims: Mapping[int, int], open_ones: list[_Named]) -> tuple[int, str | None]:
        declared = {one.name: one.tensor.shape[dims[id(one.tensor)]] for one in found if id(one.tensor) in dims}
        if len(set(declared.values())) > 1:
            raise PfeifeError(
                id="PF533",
                what=f"the declared batch dimensions have different sizes: {declared}",
                where="option batch_dims",
                hints=("declare the dimension that counts the rows", "say none for an argument without a batch"),
            )
        if declared:
            return next(iter(declared.values())), None
        candidates = [one for one in open_ones if one.tensor.dim() and one.name not in self._without]
        sizes = [one.tensor.shape[0] for one in candidates]
        if not sizes:
            return 1, None
        (rows, count), *others = Counter(sizes).most_common()  # of equal counts the first seen comes first
        ties = [size for size, number in others if number == count]
        if not ties:
            return rows, None
        chosen = [one.name for one in candidates if one.tensor.shape[0] == rows]
        rest = [one.name for one in candidates if one.tensor.shape[0] != rows]
        return rows, (
            f"it is assumed that dimension 0 of {_list(chosen)} (size {rows}) is the batch and that {_list(rest)} "
            f"carries none: as many arguments have size {ties[0]}"
        )

    # ------------------------------------------------------------------ names

    def _tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[_Named]:
        seen: set[int] = set()
        for path, leaf in pytree.tree_flatten_with_path((args, kwargs))[0]:
            if isinstance(leaf, torch.Tensor) and id(leaf) not in seen:
                seen.add(id(leaf))
                yield self._named(leaf, path)

    def _named(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> _Named:
        is_keyword, first, *rest = (str(_key(step)) for step in path)
        if is_keyword == "1":
            return _Named(tensor=tensor, name=".".join((first, *rest)), position=None)
        number = int(first)
        name = self._parameters[number] if number < len(self._parameters) else first
        return _Named(tensor=tensor, name=".".join((name, *rest)), position=".".join((first, *rest)))

    def _declared_as(self, one: _Named) -> str | None:
        """The declared name that an argument, or the structure it is in, goes by."""
        for name in (one.name, one.position):
            while name:
                if name in self._declared:
                    return name
                name = name.rpartition(".")[0]
        return None

    def _refuse_unknown(self) -> None:
        if self._parameters.open_ended:
            return
        for name in self._declared:
            first = name.split(".")[0]
            if first not in self._parameters and not (first.isdecimal() and int(first) < len(self._parameters)):
                near = did_you_mean(first, self._parameters)
                known = "arguments: " + ", ".join(self._parameters)
                raise PfeifeError(
                    id="PF532",
                    what=f"batch_dims names {name!r}, which is no argument of the model",
                    where="option batch_dims",
                    hints=(known,) if near is None else (f"did you mean {near!r}?", known),
                )


class _Parameters(tuple[str, ...]):
    """Names of a function's parameters by position; `open_ended` if it takes others by name."""

    open_ended = False


def _parameters_of(forward: Callable[..., Any]) -> _Parameters:
    found = inspect.signature(forward).parameters.values()
    stars = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = _Parameters(parameter.name for parameter in found if parameter.kind not in stars)
    names.open_ended = any(parameter.kind in stars for parameter in found)
    return names


def _key(step: Any) -> Any:
    """What a step of a pytree path looks up: an index, a key, or an attribute."""
    match step:
        case pytree.SequenceKey():
            return step.idx
        case pytree.MappingKey():
            return step.key
        case pytree.GetAttrKey():
            return step.name
        case _:
            return step


def _aliases(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    made: dict[int, torch.Tensor] = {}

    def alias(item: Any) -> Any:
        if type(item) is not torch.Tensor or item.requires_grad:  # what needs a gradient is a leaf of our own
            return item
        return made.setdefault(id(item), item.data)  # no view, as detach() is

    found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(alias, (args, kwargs))
    return found


def _checked(one: _Named, dim: int) -> int:
    if dim < one.tensor.dim():
        return dim
    raise PfeifeError(
        id="PF533",
        what=f"batch_dims says dimension {dim} of {one.name}, which has {one.tensor.dim()} dimensions",
        where=f"{one.name}: shape {tuple(one.tensor.shape)}",
        hints=(f"a number below {one.tensor.dim()}", f"{one.name}: none, if it has no batch"),
    )


def _list(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names)
