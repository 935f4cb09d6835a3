"""Custom parts: functions or classes that a configuration names, checked against a contract when loaded.

A contract is a protocol. Positional arguments of its ``__call__`` are passed by position, keyword-only ones to
parts that name them, and ``kwargs`` of the configuration unchanged.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lachesis.common.errors import ConfigError, LachesisError, did_you_mean
from lachesis.common.imports import describe_exception, load_function

PAGE = "docs/custom.md"
_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Contract:
    """The arguments that a kind of part is called with, and the result of a call.

    Args:
        kind: its name in messages; entry points belong to the group ``lachesis.KIND``, with underscores for spaces.
        given: names of the positional arguments, in order.
        named: names of the arguments passed to parts that name them.
        error: the class of error to raise if a part fails.
        makes: the class of a call's result, if that is an object with methods.
        methods: methods of that object whose errors must name the part.
    """

    kind: str
    given: tuple[str, ...]
    named: tuple[str, ...]
    error: type[LachesisError]
    makes: type[Any] | None = None
    methods: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        return entry_point_group(self.kind)


@dataclass(frozen=True, slots=True)
class Part:
    """A part that fits its contract.

    ``names`` are the arguments that it names, ``arguments`` the contract's arguments that it gets by name.
    """

    contract: Contract
    spec: str
    function: Callable[..., Any]
    names: frozenset[str]
    arguments: frozenset[str]
    kwargs: Mapping[str, Any]

    @property
    def title(self) -> str:
        return f"the {self.contract.kind} {self.spec}"

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Call the part; a foreign exception becomes the contract's error."""
        taken = {name: value for name, value in named.items() if name in self.arguments}
        return self.guarded(self.function)(*given, **taken, **self.kwargs)

    def make(self, *given: Any, **named: Any) -> Any:
        """Return the object that the part makes; errors of its methods name the part.

        Raises:
            ConfigError: the part raised, or made something else.
        """
        taken = {name: value for name, value in named.items() if name in self.arguments}
        made = self.guarded(self.function, error=ConfigError)(*given, **taken, **self.kwargs)
        kind = self.contract.makes
        if kind is not None and not isinstance(made, kind):
            raise ConfigError(
                f"{self.title} made a {type(made).__name__}, no {kind.__name__}",
                remedy=f"have it return a {kind.__module__}.{kind.__name__} ({PAGE})",
            )
        for method in self.contract.methods:
            setattr(made, method, self.guarded(getattr(made, method)))
        return made

    def guarded(self, function: Callable[..., Any], *, error: type[LachesisError] | None = None) -> Callable[..., Any]:
        """Wrap ``function`` so that foreign exceptions become an error that names the part and the line in it."""

        @functools.wraps(function)
        def call(*given: Any, **named: Any) -> Any:
            try:
                return function(*given, **named)
            except LachesisError:
                raise
            except Exception as failure:
                raise (error or self.contract.error)(
                    f"{self.title} raised {describe_exception(failure, _file_of(self.function))}",
                    remedy=f"correct it; {PAGE} describes its arguments",
                ) from failure

        return call


def contract(
    kind: str,
    protocol: type[Any],
    *,
    error: type[LachesisError],
    makes: type[Any] | None = None,
    methods: Sequence[str] = (),
) -> Contract:
    """Return the contract of a protocol's ``__call__``; parts get its keyword-only arguments if they name them."""
    parameters = [p for p in inspect.signature(protocol.__call__).parameters.values() if p.name != "self"]
    return Contract(
        kind=kind,
        given=tuple(p.name for p in parameters if p.kind in _BY_PLACE),
        named=tuple(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY),
        error=error,
        makes=makes,
        methods=tuple(methods),
    )


def entry_point_group(kind: str) -> str:
    """Return the group of entry points in which installed packages list parts of a kind."""
    return f"lachesis.{kind.replace(' ', '_')}"


def spec_of(given: str | Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return name and arguments of a part given as ``NAME`` or ``{function: NAME, kwargs: {...}}``."""
    return (given, {}) if isinstance(given, str) else (str(given["function"]), given.get("kwargs") or {})


def load_part(given: str | Mapping[str, Any], wanted: Contract) -> Part:
    """Load the part that a configuration names.

    Args:
        given: ``FILE.py:NAME``, ``module.NAME``, the name of an entry point, or a mapping with that as ``function`` and
            arguments as ``kwargs``.

    Raises:
        ConfigError: the part does not exist, or cannot be called as its contract requires.
    """
    spec, kwargs = spec_of(given)
    function = load_function(spec, group=wanted.group)
    _require_class(spec, function, wanted)
    names, takes_any = _require_signature(spec, function, wanted, kwargs)
    return Part(
        contract=wanted,
        spec=spec,
        function=function,
        names=names,
        arguments=frozenset(wanted.named) - kwargs.keys() if takes_any else names & frozenset(wanted.named),
        kwargs=kwargs,
    )


def _require_class(spec: str, function: Callable[..., Any], wanted: Contract) -> None:
    """Raise ConfigError if ``function`` is a class that is abstract or differs from the contract's kind."""
    kind = wanted.makes
    if kind is None or not inspect.isclass(function):
        return
    if not issubclass(function, kind):
        raise ConfigError(
            f"{spec!r} is no {kind.__name__}",
            remedy=f"derive it from {kind.__module__}.{kind.__name__}, or name a function that makes one ({PAGE})",
        )
    if inspect.isabstract(function):
        missing = ", ".join(sorted(getattr(function, "__abstractmethods__", ())))
        raise ConfigError(f"{spec!r} lacks methods of a {kind.__name__}: {missing}", remedy="write them")


def _require_signature(
    spec: str, function: Callable[..., Any], wanted: Contract, kwargs: Mapping[str, Any]
) -> tuple[frozenset[str], bool]:
    """Check a part's signature; return its named arguments and True if it takes any other, positional ones aside."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{spec!r}: its arguments cannot be read", remedy="write it as a function in Python"
        ) from error
    count = len(wanted.given)
    placed = [parameter for parameter in parameters if parameter.kind in _BY_PLACE]
    if len(placed) < count and not any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        missing = wanted.given[len(placed)]
        raise ConfigError(f"{spec!r} takes no {missing}", remedy=f"write it as {written(wanted)} ({PAGE})")
    first = {parameter.name for parameter in placed[:count]}
    named = {p.name: p for p in parameters if p.name not in first and p.kind not in _VARIADIC}
    for name, parameter in named.items():
        if name not in (*wanted.named, *kwargs) and parameter.default is parameter.empty:
            remedy = f"it may take: {', '.join(wanted.named)}" if wanted.named else f"write it as {written(wanted)}"
            raise ConfigError(
                f"{spec!r} needs an argument {name!r}, which {a(wanted.kind)} does not get",
                remedy=did_you_mean(name, wanted.named, otherwise=remedy),
            )
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    unknown = [name for name in kwargs if name not in named and not takes_any]
    if unknown:
        takes = f"it takes: {', '.join(named) or 'none'}"
        raise ConfigError(
            f"{spec!r} takes no argument {unknown[0]!r}, but its kwargs give it",
            remedy=did_you_mean(unknown[0], named, otherwise=takes),
        )
    return frozenset(named) - kwargs.keys(), takes_any


def a(kind: str) -> str:
    """Return the word with its indefinite article."""
    return f"{'an' if kind[0] in 'aeio' else 'a'} {kind}"


def written(wanted: Contract) -> str:
    """Return the contract's signature as a line of Python."""
    named = ["*", *wanted.named] if wanted.named else []
    return f"def {wanted.kind.replace(' ', '_')}({', '.join([*wanted.given, *named])})"


def _file_of(function: Callable[..., Any]) -> str | None:
    """Return the file of a function or class, even if it was not imported."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code.co_filename if code else getattr(sys.modules.get(function.__module__), "__file__", None)
