"""Resolution of paths: most are relative to the directory of the configuration file.

``run.dir`` is relative to the current directory instead. In another trainer's file all paths are relative to the
current directory, as in that trainer; a path that does not exist there is looked up beside the file. Values that could
also be something else are paths if they look like one or if the file exists:

- ``model.path``, ``adapter.path``, ``model.tokenizer`` and ``algorithm.teacher.model``: a value that begins with ``.``,
  ``/`` or ``~``, or an existing directory; anything else is a hub id. With ``run.setup``, which builds the model,
  ``model.path`` is always a path.
- ``source.environment``: a value that ends in ``.py``, or a class or function as below; anything else is an installed
  package.
- ``data.path``, ``sft.path`` and the paths of other datasets: the same beginnings, existing paths, and names of data
  files (``.jsonl``, ``.json``, ``.parquet``, ``.csv``); anything else is a dataset on the hub.
- ``model.chat_template``: a value without ``{``.
- ``source.command``: each argument that is an existing file; ``source.readable``.
- ``engine.urls``: the part after ``file:``.
- functions: ``FILE.py:FUNCTION``; and ``module.function`` if ``module.py`` is beside the configuration or in the
  current directory (searched in this order), before any installed module. A reward with a ``/`` and without a ``:`` is
  a reward model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lachesis.common.json_values import is_list
from lachesis.config.schema import (
    SERVERS_FILE,
    CustomPart,
    LachesisConfig,
    McpServerConfig,
    MixedSourceConfig,
    Section,
    TeacherConfig,
)

S = TypeVar("S", bound=Section)

DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")


def resolve_path(base_dir: Path, value: str) -> Path:
    """Return ``value`` as an absolute path: ``~`` expanded, relative paths taken from the absolute ``base_dir``."""
    return Path(os.path.abspath(base_dir / os.path.expanduser(value)))


def is_model_spec(spec: str) -> bool:
    """Return True if a reward is a model, by directory or hub id, and not a function."""
    return "/" in spec and ".py:" not in spec


def resolve_all(config: LachesisConfig, *, base_dir: Path, cwd: Path, like_theirs: bool = False) -> LachesisConfig:
    """Return the configuration with every path absolute, so that it works from any directory.

    Args:
        base_dir: directory of the configuration file, absolute.
        cwd: current directory, absolute.
        like_theirs: True if the file is in another trainer's dialect.
    """
    places = _Places(cwd, base_dir, both=True) if like_theirs else _Places(base_dir, cwd)
    model = partial(places.model, local=config.run.setup is not None)
    run = config.run.model_copy(update={"dir": str(resolve_path(cwd, config.run.dir))})
    sections = {
        "run": _resolved(run, setup=places.function),
        "adapter": _resolved(config.adapter, path=places.model) if config.adapter.kind == "lora" else config.adapter,
        "model": _resolved(config.model, path=model, tokenizer=places.model, chat_template=places.template),
        **_source_sections(config, places),
        "sources": [one.model_copy(update=_mixed_sections(one, places)) for one in config.sources],
        "sft": _resolved(config.sft, path=places.data),
        "algorithm": _resolved(
            config.algorithm,
            loss=places.part,
            advantage=places.part,
            teacher=places.teacher,
            teachers=lambda teachers: {name: places.teacher(one) for name, one in teachers.items()},
        ),
        "optimizer": _resolved(config.optimizer, function=places.part),
        "logging": _resolved(config.logging, sinks=places.part, health_rules=places.part),
        "engine": _resolved(config.engine, function=places.part, urls=places.address),
        "bridge": _resolved(config.bridge, config_path=places.path),
    }
    return config.model_copy(update=sections)


def _source_sections(config: LachesisConfig | MixedSourceConfig, places: _Places) -> dict[str, Section]:
    """Return the sections that define a source: those of the run, or of one of its several sources."""
    return {
        "data": _resolved(
            config.data,
            path=places.data,
            eval_path=places.data,
            transform=places.function,
            prepared_path=places.path,
            more=lambda dataset: _resolved(dataset, path=places.data, transform=places.function),
        ),
        "rewards": _resolved(config.rewards, functions=places.reward),
        "source": _resolved(
            config.source,
            rollout_func=places.part,
            tools=places.tool,
            tool_parser=places.function,
            environment=places.module,
            tasks=places.path,
            command=places.program,
            workdir=places.path,
            readable=places.path,
        ),
    }


def _mixed_sections(one: MixedSourceConfig, places: _Places) -> dict[str, Section]:
    return _source_sections(one, places) | {"algorithm": _resolved(one.algorithm, advantage=places.part)}


def _resolved(section: S, **resolvers: Callable[[Any], Any]) -> S:
    """Return the section with these keys resolved, lists item by item; unset and empty keys stay as they are."""
    values = {name: getattr(section, name) for name in resolvers if name in type(section).model_fields}
    changes = {
        name: [resolvers[name](item) for item in value] if is_list(value) else resolvers[name](value)
        for name, value in values.items()
        if value
    }
    return section.model_copy(update=changes)


@dataclass(frozen=True, slots=True)
class _Places:
    """Directories to search for relative paths and modules: ``first``, then ``second`` (for paths only if ``both``)."""

    first: Path
    second: Path
    both: bool = False

    @property
    def _searched(self) -> Sequence[Path]:
        return (self.first, self.second)

    def path(self, value: str) -> str:
        paths = [resolve_path(directory, value) for directory in self._searched]
        return str(paths[1] if self.both and not os.path.exists(paths[0]) and os.path.exists(paths[1]) else paths[0])

    def function(self, spec: str) -> str:
        file, colon, function = spec.rpartition(":")
        if colon:
            return f"{self.path(file)}:{function}" if file.endswith(".py") else spec
        module, _, function = spec.rpartition(".")
        if not module:
            return spec
        relative = f"{module.replace('.', os.sep)}.py"
        for directory in self._searched:
            if (path := resolve_path(directory, relative)).is_file():
                return f"{path}:{function}"
        return spec

    def part(self, given: CustomPart) -> CustomPart:
        """Resolve the name of a custom part, alone or in a mapping with its arguments."""
        if isinstance(given, str):
            return self.function(given)
        name = given.get("function")
        return {**given, "function": self.function(name)} if isinstance(name, str) else given

    def tool(self, given: str | McpServerConfig) -> str | McpServerConfig:
        """Resolve a tool: a function, or a server with the files of its command."""
        return self.function(given) if isinstance(given, str) else _resolved(given, command=self.program)

    def module(self, value: str) -> str:
        return self.path(value) if value.endswith(".py") else self.function(value)

    def program(self, argument: str) -> str:
        """Resolve an argument of a command to the path of the file with that name, if there is one."""
        path = self.path(argument)
        return path if argument and os.path.isfile(path) else argument

    def model(self, value: str, *, local: bool = False) -> str:
        path = self.path(value)
        return path if local or _looks_like_path(value) or Path(path).is_dir() else value

    def teacher(self, options: TeacherConfig) -> TeacherConfig:
        """Return a teacher's section, with the path of a model beside the policy."""
        return _resolved(options, model=self.model) if options.kind == "model" else options

    def reward(self, spec: str | dict[str, Any]) -> str | dict[str, Any]:
        if isinstance(spec, dict):
            name = spec.get("function")
            return {**spec, "function": self.reward(name)} if isinstance(name, str) else spec
        return self.model(spec) if is_model_spec(spec) else self.function(spec)

    def data(self, value: str) -> str:
        path = self.path(value)
        return path if _looks_like_path(value) or value.endswith(DATA_SUFFIXES) or Path(path).exists() else value

    def address(self, value: str) -> str:
        """Resolve an entry of ``engine.urls``: a file of addresses; an address stays as it is."""
        file = value.removeprefix(SERVERS_FILE)
        return value if file == value else f"{SERVERS_FILE}{self.path(file)}"

    def template(self, value: str) -> str:
        return value if "{" in value else self.path(value)


def _looks_like_path(value: str) -> bool:
    return value.startswith((".", "/", "~"))
