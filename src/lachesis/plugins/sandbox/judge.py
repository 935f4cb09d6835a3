"""Runner of a test of code in another process: the test sees stand-ins, and all comparisons are of plain data.

The test's statements run here, where the code cannot reach them; functions of the code run there, and their results
come back as plain data or as stand-ins for objects there (:mod:`lachesis.plugins.sandbox.stand_ins`).
"""

from __future__ import annotations

import ast
import builtins
import importlib
import socket
import sys
import threading
import types
from functools import cache
from typing import Any

from lachesis.plugins.sandbox.records import Verdict
from lachesis.plugins.sandbox.stand_ins import TEST_FILE, CodeEnded, Session, Unsplittable, as_class
from lachesis.plugins.sandbox.subject import MODULE

# Names that tests take for granted because the code imports them; tests get this process's own.
_USUAL = {
    "np": "numpy", "numpy": "numpy", "pd": "pandas", "Counter": "collections", "defaultdict": "collections",
    "deque": "collections", "OrderedDict": "collections", "namedtuple": "collections", "Decimal": "decimal",
    "Fraction": "fractions", "sqrt": "math", "isclose": "math", "gcd": "math", "floor": "math", "ceil": "math",
    "pi": "math", "inf": "math", "reduce": "functools", "partial": "functools", "permutations": "itertools",
    "combinations": "itertools", "product": "itertools", "StringIO": "io",
    **dict.fromkeys(("List", "Dict", "Set", "Tuple", "Optional", "Union", "Any", "Callable", "Iterable"), "typing"),
}  # fmt: skip
# Those by which a test compares; they are the code's only if the test has no other name.
_COMPARES_BY = frozenset({"isclose", "pi", "inf", "Counter", "reduce", "partial"})
# Modules whose names are the same here as in the code. A name of another module might equal anything.
_IMPORTED_FROM = (
    "bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "io", "itertools",
    "json", "math", "re", "statistics", "string", "typing",
)  # fmt: skip
_SEEN = "__lachesis_evaluated__"


def judge(link: socket.socket, code: str, test: str, imports: str) -> Verdict:
    """Run a test against code in another process.

    The test passes if its last statement returned, at least one of its assertions was evaluated if it has any, and none
    failed, even if the code or a thread caught the error. Whatever the code raises, prints or returns is never read as
    a verdict.
    """
    session = Session(link)
    try:
        session.ask({"load": code})
    except CodeEnded as error:
        return Verdict(False, f"the code ended its process ({_phrase(error)})")
    except BaseException as error:
        return Verdict(False, f"the code raised {_phrase(error)}")
    lost: list[str] = []
    threading.excepthook = lambda raised: lost.append(_phrase(raised.exc_value or raised.exc_type()))
    try:
        namespace = _Names(session, code, test, imports).found()
        sys.modules[MODULE] = _module_of(session)
        evaluated: list[bool] = []
        namespace[_SEEN] = lambda value: evaluated.append(True) or value
        counted = _Counted()
        tree = ast.fix_missing_locations(counted.visit(ast.parse(test)))
        exec(compile(tree, TEST_FILE, "exec", dont_inherit=True, optimize=0), namespace)
        _join_threads()
    except CodeEnded as error:
        return Verdict(False, f"the code ended its process ({_phrase(error)})")
    except Unsplittable as error:
        return Verdict(False, f"the test cannot be kept apart from the code: {_phrase(error)}")
    except BaseException as error:  # an error of the test, or of the code that it calls
        return Verdict(False, _phrase(error))
    if failures := [*session.failed_assertions, *lost]:
        return Verdict(False, failures[0])
    if counted.assertions and not evaluated:  # for example in a loop over the code's result, which was empty
        return Verdict(False, "none of the test's assertions was evaluated")
    return Verdict(True)


class _Counted(ast.NodeTransformer):
    """Transformer that makes each assertion of a test report its evaluation."""

    assertions = 0

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        if isinstance(node.test, ast.Constant) and not node.test.value:  # `assert False`: the test must not get here
            return node
        self.assertions += 1
        self.generic_visit(node)
        node.test = ast.Call(ast.Name(_SEEN, ast.Load()), [node.test], [])
        return node


def _join_threads() -> None:
    """Wait for the threads that the test has started."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()


def _phrase(error: BaseException) -> str:
    """Describe an exception for people; its class may be one that the code has made, whose ``str`` raises."""
    name = type(error).__name__ or "an exception without a name"
    try:
        return f"{name}: {error}"[:200]
    except BaseException:
        return name[:200]


class _Names:
    """Table of the names of a test that are the code's, and those that are this process's own.

    Built-in and usual names are this process's, even if the code defines them, unless the test has no other name to
    test.
    """

    def __init__(self, session: Session, code: str, test: str, imports: str) -> None:
        self._session = session
        self._own = {
            name: statement
            for statement in [
                *_import_statements(imports, any_module=True),
                *_import_statements(code, any_module=False),
            ]
            for name in _bound(statement)
        }
        self._free = _free_names(test)

    def found(self) -> dict[str, Any]:
        asked = self._asked()
        found = self._session.ask({"names": asked}) if asked else {}
        theirs = {name: as_class(name, found[name]) for name in asked if name in found}
        namespace: dict[str, Any] = {"__name__": "test"}
        for name, called in self._free.items():
            if name in theirs:
                namespace[name] = theirs[name]
            elif name in self._own:
                exec(compile(ast.Module([self._own[name]], []), "<imports>", "exec"), namespace)
            elif _is_module(name) and not called:
                namespace[name] = importlib.import_module(name)
            elif name in _USUAL and name not in asked and (module := _module(_USUAL[name])) is not None:
                namespace[name] = getattr(module, name, module)
        return namespace

    def _asked(self) -> list[str]:
        """Return the names to request from the code: those only it can define; else usual ones; else one built-in."""
        free = [
            name for name, called in self._free.items() if name not in self._own and (called or not _is_module(name))
        ]
        usual = [name for name in free if name in _USUAL and _USUAL[name] not in ("numpy", "pandas")]
        built_in = [name for name in free if hasattr(builtins, name)]
        certain = [name for name in free if name not in _USUAL and name not in built_in]
        tested = [name for name in usual if name not in _COMPARES_BY] or usual
        return certain or tested[:1] or built_in[:1]


@cache  # because all tests of one code request the same names
def _import_statements(source: str, *, any_module: bool) -> list[ast.Import | ast.ImportFrom]:
    """Return an import statement for each name that is imported at the top."""
    found: list[ast.Import | ast.ImportFrom] = []
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return found
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (any_module or node.module in _IMPORTED_FROM):
            for alias in node.names:
                if alias.name != "*" and (any_module or alias.asname in (None, alias.name)):
                    found.append(ast.copy_location(ast.ImportFrom(node.module, [alias], 0), node))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if any_module or alias.name in _IMPORTED_FROM or alias.name == "numpy":
                    found.append(ast.copy_location(ast.Import([alias]), node))
    return found


def _bound(statement: ast.Import | ast.ImportFrom) -> list[str]:
    return [(alias.asname or alias.name).split(".")[0] for alias in statement.names]


def _free_names(test: str) -> dict[str, bool]:
    """Return the names that a test reads but does not bind, in order of appearance; True for those that it calls."""
    nodes = list(ast.walk(ast.parse(test)))
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound.update(_bound(node))
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    read = [node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    read.sort(key=lambda node: (node.lineno, node.col_offset))
    return {node.id: node.id in called for node in read if node.id not in bound}


def _is_module(name: str) -> bool:
    return name in sys.stdlib_module_names


def _module(name: str) -> types.ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _module_of(session: Session) -> types.ModuleType:
    """Return the module that ``from solution import f`` finds."""
    module = types.ModuleType(MODULE)

    def look_up(name: str) -> Any:
        found = {} if name.startswith("__") else session.ask({"names": [name]})
        if name not in found:
            raise AttributeError(name)
        return as_class(name, found[name])

    module.__getattr__ = look_up  # type: ignore[method-assign]
    return module
