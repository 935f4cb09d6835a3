"""One rule for paths: they are relative to the directory of the configuration file.

The exception is ``run.dir``, which is relative to the current directory, as results belong where one works.
Values that could also be something else are paths when they look like one or when the file is there:

- ``model.path`` and ``model.tokenizer``: what begins with ``.``, ``/`` or ``~`` and what exists as a
  directory; everything else is a hub id. With ``run.setup``, which builds the model, ``model.path`` is a
  path in any case.
- ``model.chat_template``: whatever holds no ``{``.
- ``rewards.functions`` and ``run.setup``: ``FILE.py:FUNCTION``; and ``module.function`` where ``module.py``
  stands beside the configuration or in the current directory (looked for in this order), before anything
  that is installed.
"""

from __future__ import annotations

import os
from pathlib import Path

from lachesis.config.schema import LachesisConfig, ModelConfig


def resolve_path(base_dir: Path, value: str) -> Path:
    """``value`` as an absolute path: ``~`` expanded, relative ones taken from the absolute ``base_dir``."""
    return Path(os.path.abspath(base_dir / os.path.expanduser(value)))


def resolve_function(spec: str, *, base_dir: Path, cwd: Path) -> str:
    """``spec`` as ``FILE.py:FUNCTION`` with an absolute file; unchanged where it names no such file."""
    file, colon, function = spec.rpartition(":")
    if colon:
        return f"{resolve_path(base_dir, file)}:{function}" if file.endswith(".py") else spec
    module, _, function = spec.rpartition(".")
    if not module:
        return spec
    relative = f"{module.replace('.', os.sep)}.py"
    for directory in (base_dir, cwd):
        if (path := resolve_path(directory, relative)).is_file():
            return f"{path}:{function}"
    return spec


def resolve_model(value: str, *, base_dir: Path, local: bool = False) -> str:
    """A model directory as an absolute path, or a hub id as it is; ``local`` says that it is no hub id."""
    path = resolve_path(base_dir, value)
    return str(path) if local or value.startswith((".", "/", "~")) or path.is_dir() else value


def resolve_all(config: LachesisConfig, *, base_dir: Path, cwd: Path) -> LachesisConfig:
    """The same configuration with every path absolute, so that it can be used from anywhere.

    Args:
        base_dir: directory of the configuration file, absolute.
        cwd: current directory, absolute.
    """
    run, data, rewards = config.run, config.data, config.rewards
    setup = run.setup and resolve_function(run.setup, base_dir=base_dir, cwd=cwd)
    functions = [resolve_function(spec, base_dir=base_dir, cwd=cwd) for spec in rewards.functions]
    return config.model_copy(
        update={
            "run": run.model_copy(update={"dir": str(resolve_path(cwd, run.dir)), "setup": setup}),
            "model": _resolve_model_section(config.model, base_dir=base_dir, built_here=setup is not None),
            "data": data.model_copy(
                update={
                    "path": str(resolve_path(base_dir, data.path)),
                    "eval_path": data.eval_path and str(resolve_path(base_dir, data.eval_path)),
                }
            ),
            "rewards": rewards.model_copy(update={"functions": functions}),
        }
    )


def _resolve_model_section(model: ModelConfig, *, base_dir: Path, built_here: bool) -> ModelConfig:
    template = model.chat_template
    if template is not None and "{" not in template:
        template = str(resolve_path(base_dir, template))
    return model.model_copy(
        update={
            "path": resolve_model(model.path, base_dir=base_dir, local=built_here),
            "tokenizer": model.tokenizer and resolve_model(model.tokenizer, base_dir=base_dir),
            "chat_template": template,
        }
    )
