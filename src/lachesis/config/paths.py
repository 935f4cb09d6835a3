"""One rule for paths: they are relative to the directory of the configuration file.

The exception is ``run.dir``, which is relative to the current directory, as results belong where one works. In a
file of another trainer's all paths are relative to the current directory, as they are there; what is not found
there is looked for beside the file. Values that could also be something else are paths when they look like one
or when the file is there:

- ``model.path`` and ``model.tokenizer``: what begins with ``.``, ``/`` or ``~`` and what exists as a
  directory; everything else is a hub id. With ``run.setup``, which builds the model, ``model.path`` is a
  path in any case.
- ``data.path`` and the paths of other datasets: what begins so, what exists, and what ends as a data file does
  (``.jsonl``, ``.json``, ``.parquet``, ``.csv``); everything else is a dataset of the hub.
- ``model.chat_template``: whatever holds no ``{``.
- functions: ``FILE.py:FUNCTION``; and ``module.function`` where ``module.py`` stands beside the configuration or
  in the current directory (looked for in this order), before anything that is installed. A reward with a
  ``/`` and without a ``:`` is a model.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from lachesis.config.schema import DataConfig, LachesisConfig, ModelConfig

DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")


def resolve_path(base_dir: Path, value: str) -> Path:
    """``value`` as an absolute path: ``~`` expanded, relative ones taken from the absolute ``base_dir``."""
    return Path(os.path.abspath(base_dir / os.path.expanduser(value)))


def is_model_spec(spec: str) -> bool:
    """Whether a reward is a model, by directory or hub id, and no function."""
    return "/" in spec and ".py:" not in spec


def resolve_all(config: LachesisConfig, *, base_dir: Path, cwd: Path, like_theirs: bool = False) -> LachesisConfig:
    """The same configuration with every path absolute, so that it can be used from anywhere.

    Args:
        base_dir: directory of the configuration file, absolute.
        cwd: current directory, absolute.
        like_theirs: the file is another trainer's.
    """
    places = _Places(cwd, base_dir, both=True) if like_theirs else _Places(base_dir, cwd)
    setup = config.run.setup and places.function(config.run.setup)
    sections: dict[str, BaseModel] = {
        "run": config.run.model_copy(update={"dir": str(resolve_path(cwd, config.run.dir)), "setup": setup}),
        "model": _resolve_model_section(config.model, places=places, built_here=setup is not None),
        "data": _resolve_data(config.data, places=places),
        "rewards": config.rewards.model_copy(
            update={"functions": [places.reward(spec) for spec in config.rewards.functions]}
        ),
        "algorithm": config.algorithm.model_copy(
            update={"loss": config.algorithm.loss and places.function(config.algorithm.loss)}
        ),
    }
    if config.source.kind == "local" and config.source.rollout_func is not None:
        function = places.function(config.source.rollout_func)
        sections["source"] = config.source.model_copy(update={"rollout_func": function})
    if config.bridge.kind == "shared_vllm" and config.bridge.config_path is not None:
        path = str(places.path(config.bridge.config_path))
        sections["bridge"] = config.bridge.model_copy(update={"config_path": path})
    return config.model_copy(update=sections)


@dataclass(frozen=True, slots=True)
class _Places:
    """Where relative paths and modules are looked for: ``first``, then ``second`` (paths only with ``both``)."""

    first: Path
    second: Path
    both: bool = False

    @property
    def _searched(self) -> Sequence[Path]:
        return (self.first, self.second)

    def path(self, value: str) -> Path:
        paths = [resolve_path(directory, value) for directory in self._searched]
        return paths[1] if self.both and not paths[0].exists() and paths[1].exists() else paths[0]

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

    def model(self, value: str, *, local: bool = False) -> str:
        path = self.path(value)
        return str(path) if local or _looks_like_path(value) or path.is_dir() else value

    def reward(self, spec: str) -> str:
        return self.model(spec) if is_model_spec(spec) else self.function(spec)

    def data(self, value: str) -> str:
        path = self.path(value)
        return str(path) if _looks_like_path(value) or value.endswith(DATA_SUFFIXES) or path.exists() else value


def _looks_like_path(value: str) -> bool:
    return value.startswith((".", "/", "~"))


def _resolve_data(data: DataConfig, *, places: _Places) -> DataConfig:
    more = [
        dataset.model_copy(
            update={
                "path": places.data(dataset.path),
                "transform": dataset.transform and places.function(dataset.transform),
            }
        )
        for dataset in data.more
    ]
    return data.model_copy(
        update={
            "path": data.path and places.data(data.path),
            "eval_path": data.eval_path and places.data(data.eval_path),
            "transform": data.transform and places.function(data.transform),
            "prepared_path": data.prepared_path and str(places.path(data.prepared_path)),
            "more": more,
        }
    )


def _resolve_model_section(model: ModelConfig, *, places: _Places, built_here: bool) -> ModelConfig:
    template = model.chat_template
    if template is not None and "{" not in template:
        template = str(places.path(template))
    return model.model_copy(
        update={
            "path": places.model(model.path, local=built_here),
            "tokenizer": model.tokenizer and places.model(model.tokenizer),
            "chat_template": template,
        }
    )
