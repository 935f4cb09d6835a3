"""User functions that transform rows before their format is detected, and their arguments."""

from __future__ import annotations

import ast
import hashlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lachesis.common.errors import ConfigError, DataError
from lachesis.common.imports import describe_exception, load_function
from lachesis.rollouts.datasets.rows import Row, describe_type

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lachesis.config.schema import LachesisConfig

# The columns to remove, and options of ``Dataset.map`` that do not change its result.
_UNDERSTOOD = frozenset({"remove_columns", "desc", "num_proc", "load_from_cache_file", "keep_in_memory", "batched"})


@dataclass(frozen=True, slots=True)
class TransformSpec:
    """A transform by its name, so that another process can load it too.

    Args:
        spec: ``module.function`` or ``FILE.py:FUNCTION``.
        config: the run's configuration under Axolotl's names.
        index: number of the dataset among those of the run.
    """

    spec: str
    base_dir: Path
    config: Mapping[str, Any]
    index: int = 0


@dataclass(frozen=True, slots=True)
class Transform:
    """A transform: ``function(row)`` makes the new columns, and the old ones in ``remove_columns`` are removed."""

    spec: str
    function: Callable[..., Any]
    remove_columns: tuple[str, ...]
    takes_tokenizer: bool

    def apply(self, row: Row, tokenizer: PreTrainedTokenizerBase) -> Row:
        """Return the row with its new columns. Raises DataError that names the row if the function fails."""
        options = {"tokenizer": tokenizer} if self.takes_tokenizer else {}
        try:
            made = self.function(dict(row.columns), **options)
        except DataError as error:
            raise DataError(f"{row.place}: {error.message}", remedy=error.remedy) from error
        except Exception as error:
            raise DataError(
                f"{row.place}: the transform {self.spec!r} raised {describe_exception(error, self.function)}",
                remedy="correct the transform or this row",
            ) from error
        if not isinstance(made, Mapping):
            raise DataError(
                f"{row.place}: the transform {self.spec!r} returned {describe_type(made)}, not the row's new columns",
                remedy='return a dictionary, such as {"prompt": [...], "answer": "..."}',
            )
        kept = {name: value for name, value in row.columns.items() if name not in self.remove_columns}
        return Row(row.place, kept | dict(made))


def load_transform(named: TransformSpec) -> Transform:
    """Load ``prompt_transform(cfg, *args, **kwargs)``, or a plain function of a row.

    The first kind takes the configuration, in an argument called ``cfg`` or ``config`` or among ``*args``, and
    returns ``(function of a row, {"remove_columns": [...]})``; the second is that function itself. A function
    of a row may take the ``tokenizer`` as well.

    Raises:
        ConfigError: it cannot be loaded, or returns something else.
    """
    function = load_function(named.spec, named.base_dir)
    options: Mapping[str, Any] = {}
    if _takes_config(function):
        function, options = _made_by(named, function)
    refused = [name for name, value in options.items() if name not in _UNDERSTOOD or (name == "batched" and value)]
    if refused:
        raise ConfigError(
            f"the transform {named.spec!r} returns the option {refused[0]}, which is not supported",
            remedy="write it to map one row at a time; of the options that change rows it may return remove_columns",
        )
    removed = options.get("remove_columns") or ()
    names = (removed,) if isinstance(removed, str) else tuple(removed)
    return Transform(named.spec, function, names, takes_tokenizer="tokenizer" in _parameters(function))


def transform_rows(rows: Sequence[Row], named: TransformSpec, tokenizer: PreTrainedTokenizerBase) -> list[Row]:
    """Transform all rows. Raises as :func:`load_transform` and :meth:`Transform.apply`."""
    transform = load_transform(named)
    return [transform.apply(row, tokenizer) for row in rows]


def source_digest(named: TransformSpec) -> str:
    """Return a digest of a transform's code: its file, and the neighbouring files that it imports."""
    function = inspect.unwrap(load_function(named.spec, named.base_dir))
    module = sys.modules.get(getattr(function, "__module__", ""))
    start = getattr(module, "__file__", None)
    digest = hashlib.sha256(named.spec.rpartition(":")[2].encode())
    for file in sorted(_sources(Path(start), named.base_dir)) if start else []:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _sources(start: Path, base_dir: Path) -> set[Path]:
    """Return a file and all that it imports, recursively, from its own directory, its package or ``base_dir``."""
    found: set[Path] = set()
    queue = [start]
    while queue:
        file = queue.pop()
        if file.suffix == ".py" and file not in found:
            found.add(file)
            queue += [path for path in _imported(file, [file.parent, base_dir]) if path.is_file()]
    return found


def _imported(file: Path, roots: Sequence[Path]) -> Iterator[Path]:
    """Yield the paths that a file's imports would have beside it."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            names, bases = [alias.name for alias in node.names], roots
        elif isinstance(node, ast.ImportFrom):
            inside = [".".join(filter(None, (node.module, alias.name))) for alias in node.names]
            names = [*inside, node.module] if node.module else inside
            bases = [file.parents[node.level - 1]] if node.level else roots
        else:
            continue
        for base, name in itertools.product(bases, names):
            stem = base.joinpath(*name.split("."))
            yield from (stem.with_name(stem.name + ".py"), stem / "__init__.py")


def _takes_config(function: Callable[..., Any]) -> bool:
    parameters = list(_parameters(function).values())
    return any(one.kind is one.VAR_POSITIONAL for one in parameters) or (
        bool(parameters) and parameters[0].name in ("cfg", "config", "_cfg")
    )


def _made_by(named: TransformSpec, maker: Callable[..., Any]) -> tuple[Callable[..., Any], Mapping[str, Any]]:
    takes_any = any(one.kind is one.VAR_KEYWORD for one in _parameters(maker).values())
    options = {"dataset_idx": named.index} if takes_any or "dataset_idx" in _parameters(maker) else {}
    try:
        made = maker(ConfigView(named.config), **options)
    except Exception as error:
        raise ConfigError(
            f"the transform {named.spec!r} raised {describe_exception(error, None)} when given the configuration",
            remedy="correct it; a key that the configuration lacks is None",
        ) from error
    function, kwargs = made if isinstance(made, tuple) and len(made) == 2 else (made, {})
    if not callable(function) or not isinstance(kwargs, Mapping):
        raise ConfigError(
            f"the transform {named.spec!r} returned {describe_type(made)} when given the configuration",
            remedy='return (function of a row, {"remove_columns": [...]})',
        )
    return function, kwargs


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-in callables have no signature
        return {}


class ConfigView(Mapping[str, Any]):
    """A read-only mapping whose keys are attributes too; missing keys are ``None``, as with Axolotl's."""

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self._values = dict(values or {})

    def __getitem__(self, key: str) -> Any:
        value = self._values.get(key)
        return ConfigView(value) if isinstance(value, Mapping) else value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy and pickle read such names before there are values
            raise AttributeError(name)
        return self[name]

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value, or ``default`` if there is none."""
        return self[key] if key in self._values else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"ConfigView({self._values!r})"


def axolotl_names(config: LachesisConfig) -> dict[str, Any]:
    """Return the settings that transforms usually read from a configuration, by Axolotl's names. Plain values only."""
    sampling, data = config.sampling, config.data
    return {
        "base_model": config.model.path,
        "rl": "grpo",
        "seed": config.run.seed,
        "max_steps": config.run.steps,
        "num_epochs": config.run.epochs,
        "sequence_len": data.max_prompt_length,
        "chat_template": config.model.chat_template,
        "micro_batch_size": config.batch.micro_batch_size,
        "learning_rate": config.optimizer.learning_rate,
        "output_dir": config.run.dir,
        "dataset_processes": data.processes,
        "dataset_prepared_path": data.prepared_path,
        "datasets": [
            {"path": one.path, "name": one.name, "split": one.split, "type": one.transform}
            for one in (data, *data.more)
        ],
        "trl": {
            "num_generations": sampling.num_generations,
            "max_completion_length": sampling.max_completion_length,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "chat_template_kwargs": dict(data.chat_template_kwargs),
            "reward_funcs": list(config.rewards.functions),
            "reward_weights": config.rewards.weights,
        },
    }
