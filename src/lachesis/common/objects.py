"""Python objects of the calling program, such as functions and datasets, instead of names in a configuration.

A configuration holds text. An object gets a name, ``given.CALL.NAME``, which stands for it in the configuration, in
this process, while its :class:`NamedObject` is kept.
"""

from __future__ import annotations

import re
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

from lachesis.common.errors import ConfigError

_SPEC = re.compile(r"given\.call\d+\.\w+")
_calls = count(1)


class NamedObject:
    """An object and its name, which is forgotten with this record."""

    __slots__ = ("__weakref__", "spec", "value")

    def __init__(self, spec: str, value: Any) -> None:
        self.spec = spec
        self.value = value


_KNOWN: WeakValueDictionary[str, NamedObject] = WeakValueDictionary()


class NamedObjects:
    """The objects of one call: equal names in two calls are two objects."""

    def __init__(self) -> None:
        self._call = f"given.call{next(_calls)}"
        self.kept: list[NamedObject] = []

    def give(self, name: str, value: Any) -> str:
        """Return the name to write in place of ``value``; the same object gets the same name."""
        for known in self.kept:
            if known.value is value:
                return known.spec
        plain = re.sub(r"\W", "", name) or "object"
        taken = {known.spec for known in self.kept}
        spec = f"{self._call}.{plain}"
        for number in count(2):
            if spec not in taken:
                break
            spec = f"{self._call}.{plain}_{number}"
        named = NamedObject(spec, value)
        _KNOWN[named.spec] = named
        self.kept.append(named)
        return named.spec


def names_object(spec: str) -> bool:
    """Return True if a name stands for an object."""
    return _SPEC.fullmatch(spec) is not None


def object_named(spec: str) -> Any:
    """Return the object that a name stands for.

    Raises:
        ConfigError: the object was given in another process, or its run is gone.
    """
    found = _KNOWN.get(spec)
    if found is None:
        raise ConfigError(
            f"{spec!r} is an object that a Python program passed, but this process does not have it",
            remedy="pass it again from Python (lachesis.load), or put it into a file and name that file",
        )
    return found.value
