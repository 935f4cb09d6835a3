"""A test's view of code in another process: plain data, and stand-ins for the objects there that are not data.

The code never decides comparisons of plain data: they are made here, and an object that is not data equals no data.
"""

from __future__ import annotations

import builtins
import operator
import random
import socket
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lachesis.plugins.sandbox.link import MAX_REQUEST_BYTES, LinkClosed, receive, send
from lachesis.plugins.sandbox.plain import OPERATORS, NotPlain, decode, encode

_SHOWN_ATTRIBUTES = ("__name__", "__doc__", "__dict__", "__annotations__", "__module__", "__qualname__", "__enter__",
                     "__exit__", "__init__", "__wrapped__")  # fmt: skip


# File name of the test's statements in tracebacks.
TEST_FILE = "<test>"


class CodeEnded(BaseException):
    """Error of a code process that is gone, or that sends an invalid message."""


class Unsplittable(TypeError):
    """Error for a test that would give the code an object that cannot leave this process."""


class Session:
    """Client of the code's process, which also serves its calls of the test's functions."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._stand_ins: dict[int, Any] = {}
        self._functions: list[Callable[..., Any]] = []
        # Errors in functions of the test that the code called; the code might have caught them.
        self.failed_assertions: list[str] = []
        self._random = random.SystemRandom()

    def ask(self, question: Mapping[str, Any]) -> Any:
        """Return the value of an answer. Raises the code's own errors, or CodeEnded."""
        return self._value(self._answer(question))

    def do(self, operation: str, *args: Any, **keywords: Any) -> Any:
        """Run an operation in the code's process, on stand-ins and data."""
        question = {
            "do": operation,
            "args": [self.encode(one) for one in args],
            "keywords": {name: self.encode(one) for name, one in keywords.items()},
        }
        answer = self._answer(question)
        for place, data in answer.get("changed", {}).items():
            self._change(args, place, data)
        try:
            return self._value(answer)
        except StopIteration as error:
            if operation == "next":
                raise
            raise RuntimeError("the code raised StopIteration") from error  # it would silently end a loop of the test

    def equal(self, left: Any, right: Any) -> bool:
        """Compare two objects of the code by its own ``==``, which must not call everything equal."""
        decoy = self._random.getrandbits(62)
        asked = [(left, right), (left, decoy), (right, decoy)]
        order = self._random.sample(range(len(asked)), len(asked))
        found = {place: self.do("eq", *asked[place]) for place in order}
        return found[0] is True and found[1] is not True and found[2] is not True

    def contains(self, container: Any, item: Any) -> bool:
        """Test membership by the code's own ``in``, which must not accept everything."""
        asked = [item, self._random.getrandbits(62), hex(self._random.getrandbits(62))]
        order = self._random.sample(range(len(asked)), len(asked))
        found: dict[int, bool] = {}
        for place in order:
            try:
                found[place] = self.do("contains", container, asked[place]) is True
            except Exception:
                if not place:
                    raise
                found[place] = False  # its items may be of other types
        return found[0] and not found[1] and not found[2]

    def data(self, value: StandIn) -> Any:
        """Return the plain content of an object there, whose class derives from a plain type. Raises NotPlain."""
        try:
            data = self.do("data", value)
        except Exception as error:
            raise NotPlain(str(error)) from error
        if isinstance(data, StandIn):
            raise NotPlain("no plain data")
        return data

    def encode(self, value: Any) -> Any:
        return encode(value, self._refer)

    def _answer(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            send(self._link, question, max_bytes=MAX_REQUEST_BYTES)
            while True:
                message = receive(self._link)
                if not isinstance(message, dict):
                    raise CodeEnded("it sent no answer")
                if "call" not in message:
                    return message
                send(self._link, self._call(message))
        except LinkClosed as error:
            raise CodeEnded(str(error)) from error

    def _value(self, answer: Mapping[str, Any]) -> Any:
        try:
            if "error" in answer:
                raise self._exception(answer["error"])
            value = answer["value"]
            if isinstance(value, dict):
                return {str(name): self._decode(one) for name, one in value.items()}
            return self._decode(value)
        except (NotPlain, KeyError, AttributeError, RecursionError) as error:
            if "error" in answer and not isinstance(error, NotPlain | RecursionError):
                raise
            raise CodeEnded("it sent no answer") from error

    def _decode(self, data: Any) -> Any:
        return decode(data, self._resolve)

    def _refer(self, value: Any) -> list[Any]:
        if isinstance(value, StandIn):
            return ["ref", object.__getattribute__(value, "_number")]
        if isinstance(value, type):
            if getattr(builtins, value.__name__, None) is value:
                return ["type", value.__name__]
            if (number := getattr(value, "_lachesis_number", None)) is not None:
                return ["ref", number]
        if isinstance(value, Iterator):
            return ["iterator", self.encode(list(value))]
        if callable(value):
            self._functions.append(value)
            return ["function", len(self._functions) - 1]
        raise Unsplittable(f"{type(value).__name__} given to the code")

    def _resolve(self, data: list[Any]) -> Any:
        if data[0] == "function" and isinstance(data[1], int) and 0 <= data[1] < len(self._functions):
            return self._functions[data[1]]
        if data[0] == "type" and isinstance(kind := getattr(builtins, str(data[1]), None), type):
            return kind
        if data[0] != "ref" or not isinstance(data[1], int):
            raise NotPlain("no reference")
        if (known := self._stand_ins.get(data[1])) is None:
            known = self._stand_in(*data[1:])
            if not isinstance(known, types.CoroutineType):
                self._stand_ins[data[1]] = known
        return known

    def _stand_in(self, number: int, kind: str, name: str = "", bases: list[str] | None = None) -> Any:
        if kind == "class" and bases:
            return _exception_class(number, str(name), bases)
        stand_in = StandIn(self, number)
        return _await(self, stand_in) if kind == "coroutine" else stand_in

    def _exception(self, described: Mapping[str, Any]) -> BaseException:
        kind = self._resolve(described["class"])
        if not isinstance(kind, type) or not issubclass(kind, BaseException):
            raise NotPlain("no exception")
        error = kind.__new__(kind)
        error.args = tuple(self._decode(one) for one in described["args"])
        for name, value in self._decode(described["attributes"]).items():
            if not name.startswith("__"):
                setattr(error, name, value)
        return error

    def _call(self, message: Mapping[str, Any]) -> dict[str, Any]:
        try:
            function = self._functions[message["call"]]
            args = [self._decode(one) for one in message["args"]]
            keywords = {name: self._decode(one) for name, one in message["keywords"].items()}
            return {"value": self.encode(function(*args, **keywords))}
        except (CodeEnded, LinkClosed):
            raise
        except BaseException as error:
            if isinstance(error, AssertionError) and _raised_by_test(error):
                self.failed_assertions.append(f"AssertionError: {_text(error)}"[:200])
            return {"raised": type(error).__name__, "text": _text(error)}

    def _change(self, args: tuple[Any, ...], place: str, data: Any) -> None:
        """Repeat on an argument in this process the change that the code made to its copy."""
        try:
            old, new = args[int(place)], self._decode(data)
        except (ValueError, IndexError, NotPlain, RecursionError) as error:
            raise CodeEnded("it sent no answer") from error
        if type(old) is not type(new) or not isinstance(old, list | dict | set | bytearray):
            raise CodeEnded("it sent no answer")
        if isinstance(old, list | bytearray):
            old[:] = new
        else:
            old.clear()
            old.update(new)


def _raised_by_test(error: BaseException) -> bool:
    """Return True if an exception began in a statement of the test, and was not passed on from the code."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename == TEST_FILE


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # its arguments may be stand-ins, whose text comes from the code
        return ""


async def _await(session: Session, coroutine: StandIn) -> Any:
    return session.do("await", coroutine)


def _exception_class(number: int, name: str, bases: list[str]) -> type[BaseException]:
    """Return a class for an exception there: the built-in one, or a new one with the same base."""
    known = getattr(builtins, bases[0], None)
    if not isinstance(known, type) or not issubclass(known, BaseException):
        raise NotPlain("no exception")
    return known if name == bases[0] else type(name, (known,), {"_lachesis_number": number})


class StandIn:
    """Stand-in for an object in the code's process.

    ``_kind``: a *class* that the test names in capitals makes *things*, whose operators are part of what is tested,
    also with data of the test. An *other* object gets no such data, which may be the expected result.
    """

    __slots__ = ("_kind", "_number", "_session")

    def __init__(self, session: Session, number: int) -> None:
        for name, value in (("_session", session), ("_number", number), ("_kind", "other")):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _SHOWN_ATTRIBUTES:
            raise AttributeError(name)
        return _do(self, "getattr", name)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        made = _session(self).do("call", self, *args, **keywords)
        return _as_thing(made) if _kind(self) == "class" else made

    def __eq__(self, other: object) -> bool:
        if isinstance(other, StandIn):
            return _session(self).equal(self, other)
        try:
            return bool(_session(self).data(self) == other)
        except NotPlain:
            return False

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        value = _do(self, "hash")
        return hash(value) if isinstance(value, int) else 0

    def __bool__(self) -> bool:
        return _do(self, "bool") is True

    def __contains__(self, item: object) -> bool:
        if isinstance(item, StandIn):
            return _do(self, "contains", item) is True
        if _kind(self) == "thing":
            return _session(self).contains(self, item)
        return any(entry == item for entry in self)

    def __iter__(self) -> Iterator[Any]:
        iterator = _do(self, "iter")
        if not isinstance(iterator, StandIn):
            return iter(iterator)
        return iterator if iterator is self else _steps(iterator)

    def __next__(self) -> Any:
        return _do(self, "next")

    def __reversed__(self) -> Iterator[Any]:
        return iter(_do(self, "reversed"))

    def __enter__(self) -> Any:
        return self.__getattr__("__enter__")()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        return self.__getattr__("__exit__")(None if kind is None else kind, None, None)

    def __round__(self, digits: int | None = None) -> Any:
        return _do(self, "round", *([] if digits is None else [digits]))

    def __await__(self) -> Any:
        yield from _await(_session(self), self).__await__()

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, StandIn) and _session(self).do("isinstance", instance, self) is True

    def __subclasscheck__(self, subclass: object) -> bool:
        return isinstance(subclass, StandIn) and _session(self).do("issubclass", subclass, self) is True


def _session(stand_in: StandIn) -> Session:
    return object.__getattribute__(stand_in, "_session")


def _do(stand_in: StandIn, operation: str, *args: Any) -> Any:
    return _session(stand_in).do(operation, stand_in, *args)


def _kind(stand_in: StandIn) -> str:
    return object.__getattribute__(stand_in, "_kind")


def _as_thing(value: Any) -> Any:
    if isinstance(value, StandIn):
        object.__setattr__(value, "_kind", "thing")
    return value


def _steps(iterator: StandIn) -> Iterator[Any]:
    while True:
        try:
            yield _do(iterator, "next")
        except StopIteration:
            return


def _hand_on(name: str, kind: type | None) -> Callable[..., Any]:
    """Return a method that the code's process computes; ``kind`` is the type that Python requires of the result."""

    def hand_on(self: StandIn, *args: Any) -> Any:
        value = _do(self, name, *args)
        if kind is not None and not isinstance(value, kind):
            raise TypeError(f"{type(value).__name__} instead of {kind.__name__}")
        return value

    return hand_on


def _compare(name: str) -> Callable[[StandIn, Any], bool]:
    def compare(self: StandIn, other: Any) -> bool:
        if isinstance(other, StandIn):
            return _do(self, name, other) is True
        try:
            return getattr(_session(self).data(self), f"__{name}__")(other)
        except NotPlain:
            return NotImplemented

    return compare


def _combine(name: str, *, reflected: bool) -> Callable[[StandIn, Any], Any]:
    """Return a method for an operator: computed there for things, else here on plain data."""

    def combine(self: StandIn, other: Any) -> Any:
        session = _session(self)
        pair = (other, self) if reflected else (self, other)
        if isinstance(other, StandIn):
            result = session.do(name, *pair)
            return _as_thing(result) if "thing" in (_kind(self), _kind(other)) else result
        if _kind(self) == "thing":
            return _as_thing(session.do(name, *pair))
        try:
            data = session.data(self)
        except NotPlain:
            raise TypeError("an object of the code cannot be combined with data of the test") from None
        operation = _OPERATORS[name]
        return operation(other, data) if reflected else operation(data, other)

    return combine


_KINDS = {
    "len": int, "str": str, "repr": str, "format": str, "int": int, "index": int, "float": float, "complex": complex,
}  # fmt: skip
_HANDED_ON = ("setattr", "delattr", "getitem", "setitem", "delitem", "abs", "neg", "pos", "invert")
for _name in (*_KINDS, *_HANDED_ON):
    setattr(StandIn, f"__{_name}__", _hand_on(_name, _KINDS.get(_name)))
_OPERATORS = {name: getattr(operator, name) for name in OPERATORS}
for _name in ("lt", "le", "gt", "ge"):
    setattr(StandIn, f"__{_name}__", _compare(_name))
for _name in OPERATORS:
    setattr(StandIn, f"__{_name.rstrip('_')}__", _combine(_name, reflected=False))
    setattr(StandIn, f"__r{_name.rstrip('_')}__", _combine(_name, reflected=True))


def as_class(name: str, value: Any) -> Any:
    """Mark an object that the test names in capitals as a class, which makes things."""
    if isinstance(value, StandIn) and name[:1].isupper():
        object.__setattr__(value, "_kind", "class")
    return value
