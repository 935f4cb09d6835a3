"""Functions that a configuration names: `module.function`, or `FILE.py:FUNCTION` next to the configuration."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from lachesis.common.errors import ConfigError, DependencyError, did_you_mean, escape_controls
from lachesis.common.objects import names_object, object_named

# Examples name functions of this module, but a user may have another module of that name.
_BUILT_IN = "grpo_code"
_RELATIVE_IMPORT = re.compile(rb"^[ \t]*from[ \t]+\.", re.MULTILINE)
# Module that a new process imports instead of a file, with the file's content from its import here.
_STAND_IN = "__file__ = {file!r}\nexec(compile({content!r}, __file__, 'exec', dont_inherit=True), globals())\n"
_BUILT_IN_ROOM = "lachesis.plugins.sandbox.rewards"


def installed_version(package: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def optional_package(name: str, why: str, *, remedy: str) -> Any:
    """Import an optional package. Raises DependencyError with ``why``, the reason why it is needed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DependencyError(f"{why} ({error})", remedy=remedy) from error


@contextlib.contextmanager
def without(*names: str) -> Iterator[None]:
    """Hide modules that are not imported yet while the block runs, so that libraries work without them.

    Use it in processes that Lachesis starts: a library that missed a module may still miss it later.
    """
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # pyright: ignore[reportArgumentType,reportCallIssue]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def load_function(spec: str, base_dir: Path | None = None, *, group: str | None = None) -> Callable[..., Any]:
    """Return the function that ``spec`` names.

    Args:
        spec: ``package.module.function``, or ``FILE.py:FUNCTION`` with FILE relative to ``base_dir``.
            If there is no module ``grpo_code``, or it lacks the function, this package's own is used. A name that
            stands for an object (:mod:`lachesis.common.objects`) gives that object.
        base_dir: usually the directory of the configuration, the current one if unset; during the import its modules
            take precedence over installed ones of the same name.
        group: of entry points: a name without a dot is an entry point of an installed package.

    Raises:
        ConfigError: the spec has neither form, the module cannot be found or imported, or it has no such
            function.
    """
    if names_object(spec):
        return object_named(spec)
    if group is not None and not names_module(spec):
        return _load_entry_point(spec, group)
    base_dir = (base_dir or Path()).resolve()
    if ":" in spec:
        file_name, _, attribute = spec.rpartition(":")
        _check_form(spec, file_name.endswith(".py") and attribute.isidentifier())
        module = _load_file(spec, (base_dir / Path(file_name).expanduser()).resolve())
    else:
        module_name, _, attribute = spec.rpartition(".")
        _check_form(spec, all(part.isidentifier() for part in spec.split(".")) and bool(module_name))
        module = _load_module(spec, module_name, base_dir)
        if module_name.split(".")[0] == _BUILT_IN and not hasattr(module, attribute):
            module = _built_in(module_name, attribute) or module
    return _callable_of(module, attribute, spec)


def names_module(spec: str) -> bool:
    """Return True if ``spec`` names a function of a module or file, rather than a name alone."""
    return not {".", ":"}.isdisjoint(spec)


def describe_exception(error: BaseException, where: str | Callable[..., Any] | None) -> str:
    """Return text such as ``KeyError: 'answer' (rewards.py:12)``: the innermost place in ``where``, else of all."""
    code = None if where is None or isinstance(where, str) else getattr(inspect.unwrap(where), "__code__", None)
    file = where if isinstance(where, str) else code and code.co_filename
    ours = str(Path(__file__).parents[1])
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((ours, "<frozen"))]
    own = [frame for frame in frames if frame.filename == file] or frames
    place = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    text = escape_controls(str(error))
    return f"{type(error).__name__}{': ' + text if text else ''}{place}"


def entry_point_names(group: str) -> list[str]:
    """Return the names that installed packages list in a group of entry points."""
    return sorted(_entry_points(group))


def _entry_points(group: str) -> dict[str, metadata.EntryPoint]:
    """Return entry points by name, both of ``lachesis.reward`` and of its plural ``lachesis.rewards``."""
    return {point.name: point for one in (f"{group}s", group) for point in metadata.entry_points(group=one)}


def _load_entry_point(name: str, group: str) -> Callable[..., Any]:
    found = _entry_points(group).get(name)
    if found is None:
        known = ", ".join(entry_point_names(group)) or "none"
        raise ConfigError(
            f"{name!r} is not an entry point of the group {group} of any installed package",
            remedy=f"write FILE.py:NAME or module.NAME, or install the package that has it (known: {known})",
        )
    with _import_errors(name, file=None):
        function = found.load()
    if not callable(function):
        raise ConfigError(
            f"the entry point {name!r} of {group} is a {type(function).__name__}, not a function",
            remedy="correct the package",
        )
    return function


def _check_form(spec: str, good: bool) -> None:
    if not good:
        raise ConfigError(
            f"{spec!r} does not name a function",
            remedy="write `module.function`, or `FILE.py:FUNCTION` with FILE relative to the configuration",
        )


def _load_file(spec: str, file: Path) -> ModuleType:
    """Import a file under a unique name; the same file with the same content is imported once."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{spec!r}: cannot read {file}: {error.strerror}",
            remedy="check the path; it is relative to the directory of the configuration",
        ) from error
    name = f"_lachesis_{re.sub(r'[^0-9A-Za-z_]', '_', file.stem)}_{_digest(file, content)}"
    if name in sys.modules:
        return sys.modules[name]
    if _RELATIVE_IMPORT.search(content):
        return _load_of_package(spec, file)
    plan = importlib.util.spec_from_file_location(name, file)
    if plan is None or plan.loader is None:
        raise ConfigError(f"{spec!r}: {file} is not a Python file", remedy="name a file that ends in .py")
    module = importlib.util.module_from_spec(plan)
    sys.modules[name] = module  # dataclasses and pickle look the module up while it runs
    with _import_errors(spec, file=str(file)), _first_on_path(_around_package(file)), _first_on_path(file.parent):
        try:
            # Not by the loader: its bytecode cache would miss a change within the same second.
            exec(compile(content, str(file), "exec", dont_inherit=True), module.__dict__)
        except BaseException:
            del sys.modules[name]
            raise
    _add_stand_in(name, content, file)
    return module


def _add_stand_in(name: str, content: bytes, file: Path) -> None:
    """Let new processes of ``multiprocessing`` import a file under the name that it has here.

    They have this process's path, by which unpickling finds functions and classes by name.
    """
    directory = _stand_ins()
    directory.joinpath(f"{name}.py").write_text(_STAND_IN.format(content=content, file=str(file)))
    if str(directory) not in sys.path:
        sys.path.append(str(directory))


def _digest(file: Path, content: bytes) -> str:
    return hashlib.sha256(str(file).encode() + content).hexdigest()[:12]


@cache
def _stand_ins() -> Path:
    """Return this process's directory with a module for each file that was imported under a unique name."""
    directory = Path(tempfile.mkdtemp(prefix="lachesis-modules-"))
    made_by = os.getpid()

    @atexit.register
    def remove() -> None:
        if os.getpid() == made_by:
            shutil.rmtree(directory, ignore_errors=True)

    return directory


def _around_package(file: Path) -> Path:
    """Return the folder that contains the file's package, whose other modules it may import; else the file's folder."""
    folder = file.parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    return folder


def _load_of_package(spec: str, file: Path) -> ModuleType:
    """Import a file that has relative imports, as a part of the package in its folder.

    Raises:
        ConfigError: another package of that name is already loaded, or the import failed.
    """
    around = _around_package(file)
    around = around.parent if around == file.parent else around  # a folder without __init__.py is a package, too
    parts = file.relative_to(around).with_suffix("").parts
    name = ".".join(parts if parts[-1] != "__init__" else parts[:-1])
    with _import_errors(spec, file=str(file)), _first_on_path(around):
        module = importlib.import_module(name)
    if Path(module.__file__ or "").resolve() != file:
        raise ConfigError(
            f"{spec!r}: {file} has relative imports, but the package {parts[0]!r} was found elsewhere "
            f"({module.__file__})",
            remedy="rename the folder",
        )
    return module


def _load_module(spec: str, name: str, base_dir: Path) -> ModuleType:
    """Import a module by name; refuse a module of that name that was loaded from elsewhere."""
    own = next((path for path in _candidates(name, base_dir) if path.is_file()), None)
    loaded = sys.modules.get(name)
    if own and loaded and Path(getattr(loaded, "__file__", None) or "").resolve() != own:
        raise ConfigError(
            f"{spec!r}: {own} cannot be imported as {name!r}: another module of that name is loaded",
            remedy=f"name the file: {own.name}:{spec.rpartition('.')[2]}",
        )
    with _import_errors(spec, file=str(own) if own else None), _first_on_path(base_dir):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
                raise  # the module exists, but one of its imports does not
            if error.name == _BUILT_IN:
                return importlib.import_module(f"{_BUILT_IN_ROOM}.{name}")
            raise ConfigError(
                f"{spec!r}: no module {error.name!r} in {base_dir} or among the installed packages",
                remedy="check the spelling, and that of files next to the configuration, or name FILE.py:FUNCTION",
            ) from error


def _built_in(name: str, attribute: str) -> ModuleType | None:
    """Return this package's module ``name`` if it has the function, else None."""
    try:
        module = importlib.import_module(f"{_BUILT_IN_ROOM}.{name}")
    except ModuleNotFoundError:
        return None
    return module if hasattr(module, attribute) else None


def _candidates(name: str, base_dir: Path) -> tuple[Path, Path]:
    stem = base_dir.joinpath(*name.split("."))
    return stem.with_name(stem.name + ".py"), stem / "__init__.py"


@contextlib.contextmanager
def _import_errors(spec: str, *, file: str | None) -> Iterator[None]:
    """Turn any error of the user's module in the block into a ConfigError that names it.

    If the module switches gradients off, which is a state of the thread, the block restores them.
    """
    torch = sys.modules.get("torch")
    with_gradients = torch is None or torch.is_grad_enabled()
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{spec!r}: importing it raised {describe_exception(error, file)}",
            remedy="fix the module, or install its dependencies",
        ) from error
    finally:
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_grad_enabled(with_gradients)


@contextlib.contextmanager
def _first_on_path(directory: Path) -> Iterator[None]:
    """Search ``directory`` first during an import, and last from then on.

    First, because the user's modules import each other as scripts do. Last afterwards, because a user's ``datasets.py``
    must not replace a package that is imported lazily much later.
    """
    entry = str(directory)
    sys.path.insert(0, entry)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the module may have changed sys.path itself
            sys.path.remove(entry)
        if entry not in sys.path:
            sys.path.append(entry)


def _callable_of(module: ModuleType, attribute: str, spec: str) -> Callable[..., Any]:
    place = getattr(module, "__file__", None) or module.__name__
    found = getattr(module, attribute, None)
    if callable(found):
        return found
    names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    listed = f"name one of: {', '.join(names) or '(it has none)'}"
    problem = "no function" if found is None else f"a {type(found).__name__}, no function,"
    raise ConfigError(
        f"{spec!r}: {place} has {problem} {attribute!r}",
        remedy=did_you_mean(attribute, names, otherwise=listed),
    )
