"""Process that runs code of a model, and answers calls of its functions.

No decision is made here. The code may tamper with this module: it can only change the data that its
own functions return.
"""

from __future__ import annotations

import builtins
import linecache
import operator
import socket
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from lachesis.plugins.sandbox.link import MAX_REQUEST_BYTES, LinkClosed, receive, send
from lachesis.plugins.sandbox.plain import OPERATORS, NotPlain, base_value, decode, encode

# Name of the code's module: pickle finds its classes there, and a script's main part is not run.
MODULE = "solution"
_MUTABLE = (list, dict, set, bytearray)
_SIMPLE = ("getitem", "setitem", "delitem", "contains", "eq", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert")
_BUILT_IN = ("getattr", "setattr", "delattr", "iter", "next", "len", "repr", "format", "round", "hash", "reversed")
_KINDS = ("str", "int", "float", "bool", "complex", "isinstance", "issubclass")
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *args, **keywords: function(*args, **keywords),
    "index": operator.index,
    "await": lambda awaitable: _run(awaitable),
    "data": base_value,
    **{name: getattr(builtins, name) for name in (*_BUILT_IN, *_KINDS)},
    **{name: getattr(operator, name) for name in (*_SIMPLE, *OPERATORS)},
}


def answer(link: socket.socket) -> None:
    """Serve one judge until it closes the connection."""
    subject = _Subject(link)
    try:
        while True:
            subject.reply(receive(link, max_bytes=MAX_REQUEST_BYTES))
    except LinkClosed:
        return


def load_module(code: str, name: str) -> types.ModuleType:
    """Run code as a module of a name, which pickle, dataclasses and tracebacks find."""
    module = types.ModuleType(name)
    module.__file__ = f"{name}.py"
    sys.modules[name] = module
    linecache.cache[module.__file__] = (len(code), None, code.splitlines(keepends=True), module.__file__)
    exec(compile(code, module.__file__, "exec", dont_inherit=True), module.__dict__)
    return module


class _Subject:
    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._module = types.ModuleType(MODULE)
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def reply(self, question: Mapping[str, Any]) -> None:
        try:
            result = self._do(question)
        except LinkClosed:
            raise
        except BaseException as error:  # any error of the code: the test has to see it
            result = {"error": self._describe(error)}
        try:
            send(self._link, result)
        except (ValueError, RecursionError) as error:
            send(self._link, {"error": self._describe(error)})

    def _do(self, question: Mapping[str, Any]) -> dict[str, Any]:
        if "load" in question:
            self._module = load_module(question["load"], MODULE)
            return {"value": None}
        if "names" in question:
            known = vars(self._module)
            return {"value": {name: self._encode(known[name]) for name in question["names"] if name in known}}
        args = [self._decode(one) for one in question["args"]]
        keywords = {name: self._decode(one) for name, one in question.get("keywords", {}).items()}
        before = [encode(one, _no_reference) if type(one) in _MUTABLE else None for one in args]
        answer: dict[str, Any] = {"value": self._encode(_OPERATIONS[question["do"]](*args, **keywords))}
        # The test also sees changes that a function made to its arguments.
        for place, (arg, old) in enumerate(zip(args, before, strict=True)):
            if old is not None and encode(arg, _no_reference) != old:
                answer.setdefault("changed", {})[str(place)] = self._encode(arg)
        return answer

    def _encode(self, value: Any) -> Any:
        return encode(value, self._refer)

    def _decode(self, data: Any) -> Any:
        return decode(data, self._resolve)

    def _refer(self, value: Any) -> list[Any]:
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        if isinstance(value, type):
            if getattr(builtins, value.__name__, None) is value and not issubclass(value, BaseException):
                return ["type", value.__name__]
            return ["ref", number, "class", value.__name__, _exception_bases(value)]
        if isinstance(value, types.ModuleType):
            return ["ref", number, "module", value.__name__]
        return ["ref", number, "coroutine" if isinstance(value, types.CoroutineType) else "object"]

    def _resolve(self, data: list[Any]) -> Any:
        if data[0] == "ref":
            return self._objects[data[1]]
        if data[0] == "function":
            return self._function(data[1])
        if data[0] == "iterator":
            return iter(self._decode(data[1]))
        if data[0] == "type":
            return getattr(builtins, data[1])
        raise NotPlain(str(data[0]))

    def _function(self, number: int) -> Callable[..., Any]:
        """Return a stand-in for a function of the test, which runs in the judge."""

        def call(*args: Any, **keywords: Any) -> Any:
            send(
                self._link,
                {
                    "call": number,
                    "args": [self._encode(one) for one in args],
                    "keywords": {name: self._encode(one) for name, one in keywords.items()},
                },
            )
            while True:
                message = receive(self._link)
                if "value" in message:
                    return self._decode(message["value"])
                if "raised" in message:
                    raise getattr(builtins, message["raised"], RuntimeError)(message["text"])
                self.reply(message)

        return call

    def _describe(self, error: BaseException) -> dict[str, Any]:
        def content(values: Any) -> list[Any]:
            return [self._encode(value) for value in values]

        try:
            args, attributes = content(error.args), content([vars(error)])[0]
        except (NotPlain, RecursionError):
            args, attributes = [str(error)], ["dict", []]
        return {"class": self._refer(type(error)), "args": args, "attributes": attributes}


def _exception_bases(kind: type) -> list[str] | None:
    """Return the built-in exceptions that a class derives from, the nearest first; None if it is not an exception."""
    if not issubclass(kind, BaseException):
        return None
    return [
        base.__name__ for base in kind.__mro__ if getattr(builtins, base.__name__, None) is base and base is not object
    ]


def _no_reference(value: Any) -> list[Any]:
    return ["other", id(value)]


def _run(awaitable: Any) -> Any:
    import asyncio  # it takes much memory, and few programs use it

    return asyncio.run(_wait(awaitable))


async def _wait(awaitable: Any) -> Any:
    return await awaitable
