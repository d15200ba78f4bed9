"""Plans as JSON and back, exactly.

Models: frozen dataclasses of numbers, texts, enums, tuples and each other; floats keep every bit.
Ignores: anything else, on purpose: a plan read from a file can build nothing but plain data.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from enum import Enum
from typing import Any, TypeVar

from pfeife_accelerate.errors import InternalError, PfeifeError, did_you_mean
from pfeife_accelerate.ir.plan import PipelinePlan

__all__ = ["decode", "encode", "from_json", "to_json"]

T = TypeVar("T")


def to_json(plan: PipelinePlan) -> str:
    """The plan as readable JSON; the same plan always gives the same text."""
    return json.dumps(encode(plan), indent=1, sort_keys=True, allow_nan=False) + "\n"


def from_json(text: str) -> PipelinePlan:
    """Read a plan back; refuses other versions, unknown keys and wrong types."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise PfeifeError(id="PF161", what="the plan is not JSON", why=str(error)) from error
    version = data.get("version") if isinstance(data, dict) else None
    if version != PipelinePlan.VERSION:
        raise PfeifeError(
            id="PF162",
            what=f"the plan has version {version!r}",
            why=f"this release reads version {PipelinePlan.VERSION}",
            hints=("make the plan again with this release",),
        )
    return decode(PipelinePlan, data, "plan")


def encode(value: object) -> Any:
    """Any value of our types as what `json.dumps` takes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise InternalError(id="PF165", what=f"cannot write {type(value).__name__} as JSON")


def decode(cls: type[T], data: object, where: str = "value") -> T:
    """Build a dataclass of ours from parsed JSON; `where` names it in errors."""
    if not isinstance(data, dict):
        raise _wrong(where, "an object", data)
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in data:
        if key not in fields:
            near = did_you_mean(str(key), fields)
            raise PfeifeError(
                id="PF163",
                what=f"unknown key {key!r} in {where}",
                why=f"{cls.__name__} has {', '.join(fields)}",
                hints=(f"did you mean {near!r}?",) if near else (),
            )
    values: dict[str, object] = {}
    for name, field in fields.items():
        if name in data:
            values[name] = _decode(hints[name], data[name], f"{where}.{name}")
        elif field.default is dataclasses.MISSING:
            raise PfeifeError(id="PF163", what=f"{where} has no {name!r}", why=f"{cls.__name__} needs it")
    return cls(**values)


def _decode(hint: Any, data: object, where: str) -> object:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in arguments:
            return None
        return _decode(next(a for a in arguments if a is not type(None)), data, where)
    if origin is tuple:
        return _decode_tuple(arguments, data, where)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return decode(hint, data, where)
    if isinstance(hint, type) and issubclass(hint, Enum):
        members = [member.value for member in hint]
        if data not in members:
            raise _wrong(where, f"one of {members}", data)
        return hint(data)
    if hint is float and isinstance(data, (int, float)) and not isinstance(data, bool):
        return float(data)
    if hint in (bool, int, str) and type(data) is hint:
        return data
    raise _wrong(where, getattr(hint, "__name__", str(hint)), data)


def _decode_tuple(arguments: tuple[Any, ...], data: object, where: str) -> tuple[object, ...]:
    if not isinstance(data, list):
        raise _wrong(where, "a list", data)
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        arguments = (arguments[0],) * len(data)
    if len(arguments) != len(data):
        raise _wrong(where, f"{len(arguments)} items", data)
    pairs = zip(arguments, data, strict=True)
    return tuple(_decode(hint, item, f"{where}[{i}]") for i, (hint, item) in enumerate(pairs))


def _wrong(where: str, expected: str, data: object) -> PfeifeError:
    return PfeifeError(id="PF164", what=f"{where} is {data!r}", why=f"expected {expected}")
