"""Plain data between a test and the code that it tests, so that data is compared, never foreign objects.

JSON's own types are unchanged; every other value is a list that begins with a tag. A value without a plain form is
passed by reference.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import math
import struct
import sys
from collections.abc import Callable, Iterable
from typing import Any

MAX_DEPTH = 150
# Operators on two values, by their names in the module `operator`.
OPERATORS = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift",
)  # fmt: skip
_SAFE = 1 << 53
# Types whose values are read back from their text.
_FROM_TEXT: dict[type, Callable[[str], Any]] = {
    decimal.Decimal: decimal.Decimal,
    fractions.Fraction: fractions.Fraction,
    datetime.date: datetime.date.fromisoformat,
    datetime.datetime: datetime.datetime.fromisoformat,
    datetime.time: datetime.time.fromisoformat,
}
# Readers of the values that consist of texts and numbers alone, by tag.
_READ: dict[str, Callable[..., Any]] = {
    "int": lambda digits: int(digits, 16),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "complex": complex,
    "timedelta": datetime.timedelta,
    "ellipsis": lambda: ...,
    "notimplemented": lambda: NotImplemented,
    "array": lambda *parts: _decode_array(*parts),
    **{kind.__name__: read for kind, read in _FROM_TEXT.items()},
}
_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset"}
_MAPPINGS: dict[type, str] = {dict: "dict", collections.OrderedDict: "OrderedDict", collections.Counter: "Counter"}
_MAKE: dict[str, Callable[[Iterable[Any]], Any]] = {
    **{name: kind for kind, name in _SEQUENCES.items()},
    **{name: kind for kind, name in _MAPPINGS.items()},
    "Counter": lambda pairs: collections.Counter(dict(pairs)),
}


class NotPlain(ValueError):
    """Error for a value that is not data, or for data that :func:`encode` cannot have made."""


def encode(value: Any, refer: Callable[[Any], Any], depth: int = 0) -> Any:
    """Encode a value as JSON; ``refer`` returns the reference of an object, or raises NotPlain."""
    kind = type(value)
    if value is None or kind is bool or kind is str or kind is float:
        return value
    if kind is int:
        return value if -_SAFE < value < _SAFE else ["int", hex(value)]
    if depth > MAX_DEPTH:
        raise NotPlain("nested too deep")

    def parts(values: Iterable[Any]) -> list[Any]:
        return [encode(entry, refer, depth + 1) for entry in values]

    if kind in _SEQUENCES:
        return [_SEQUENCES[kind], parts(value)]
    if kind in _MAPPINGS:
        return [_MAPPINGS[kind], [parts(pair) for pair in value.items()]]
    if kind is collections.defaultdict:
        return ["dict", [parts(pair) for pair in value.items()]]
    if kind is bytes or kind is bytearray:
        return [kind.__name__, value.hex()]
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind is range:
        return ["range", *parts((value.start, value.stop, value.step))]
    if kind is slice:
        return ["slice", parts((value.start, value.stop, value.step))]
    if kind is collections.deque:
        return ["deque", parts(value), value.maxlen]
    if kind in _FROM_TEXT:
        return [kind.__name__, value.isoformat() if hasattr(value, "isoformat") else str(value)]
    if kind is datetime.timedelta:
        return ["timedelta", value.days, value.seconds, value.microseconds]
    if kind is type(Ellipsis):
        return ["ellipsis"]
    if value is NotImplemented:
        return ["notimplemented"]
    return _encode_array(value) or refer(value)


def decode(data: Any, resolve: Callable[[list[Any]], Any], depth: int = 0) -> Any:
    """Return the value of encoded data; ``resolve`` returns the object of a reference.

    Raises:
        NotPlain: :func:`encode` does not make such data.
    """
    if data is None or isinstance(data, bool | str | float | int):
        return data
    if not isinstance(data, list) or not data or not isinstance(data[0], str) or depth > MAX_DEPTH + 1:
        raise NotPlain("no data")

    def parts(values: Iterable[Any]) -> list[Any]:
        return [decode(entry, resolve, depth + 1) for entry in values]

    tag, *rest = data
    try:
        if tag in ("dict", "OrderedDict", "Counter"):
            return _MAKE[tag]([(parts(pair)[0], parts(pair)[1]) for pair in rest[0]])
        if tag in _MAKE:
            return _MAKE[tag](parts(rest[0]))
        if tag in _READ:
            return _READ[tag](*rest)
        if tag == "range":
            return range(*parts(rest))
        if tag == "slice":
            return slice(*parts(rest[0]))
        if tag == "deque":
            return collections.deque(parts(rest[0]), rest[1])
    except (TypeError, ValueError, IndexError, OverflowError, ArithmeticError, SyntaxError, struct.error) as error:
        raise NotPlain(str(error)) from error
    return resolve(data)


def base_value(value: Any) -> Any:
    """Return the plain content of an object whose class derives from a plain type and compares as that does.

    Raises:
        NotPlain: there is none.
    """
    for kind in (str, int, float):
        if isinstance(value, kind) and type(value).__eq__ is kind.__eq__:
            return str.__str__(value) if isinstance(value, str) else kind.__pos__(value)  # type: ignore[attr-defined]
    for kind in (tuple, list, set, frozenset, dict):
        if isinstance(value, kind) and type(value).__eq__ is kind.__eq__:
            return kind(dict.items(value) if isinstance(value, dict) else kind.__iter__(value))  # type: ignore
    raise NotPlain("not plain data")


def _encode_array(value: Any) -> Any:
    """Encode numpy's arrays and scalars of numbers, booleans and texts."""
    numpy = sys.modules.get("numpy")
    if numpy is None or (type(value) is not getattr(numpy, "ndarray", None) and not isinstance(value, numpy.generic)):
        return None
    array = numpy.asarray(value)
    if array.dtype.kind not in "biufcSU":
        return None
    scalar = not isinstance(value, numpy.ndarray)
    return ["array", array.dtype.str, list(array.shape), array.tobytes().hex(), scalar]


def _decode_array(dtype: str, shape: list[int], content: str, scalar: bool) -> Any:
    import numpy

    kind = numpy.dtype(dtype)
    if kind.kind not in "biufcSU" or math.prod(shape) * kind.itemsize != len(content) // 2:
        raise ValueError("not an array of numbers")
    array = numpy.frombuffer(bytes.fromhex(content), dtype=kind).reshape(shape)
    return array[()] if scalar else array.copy()
