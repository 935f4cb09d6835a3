"""The evaluation of a model on the held-out problems of a configuration, outside of any run."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from lachesis.common.errors import ConfigError
from lachesis.common.types import EvalResult
from lachesis.config.schema import LachesisConfig
from lachesis.config.schema.model import NoAdapterConfig
from lachesis.run.context import ALONE
from lachesis.run.directory import RunDirectory
from lachesis.run.launch import seed_everything, set_up
from lachesis.run.train import build_parts


def evaluate_model(config: LachesisConfig, model: Path | None) -> EvalResult:
    """Evaluate a model, or the one that the configuration starts from, as a run evaluates before its first step.

    Args:
        config: of a run, with held-out problems.
        model: directory of a whole model; ``None`` evaluates ``model.path``.

    Raises:
        ConfigError: there are no held-out problems.
        LachesisError: another of its subclasses, where a part cannot be built.
    """
    if model is not None:
        trained = config.model.model_copy(update={"path": str(model), "revision": None})
        config = config.model_copy(update={"model": trained, "adapter": NoAdapterConfig(kind="none")})
    seed_everything(config.run.seed)
    set_up(config)
    with TemporaryDirectory(prefix="lachesis-evaluation-") as place, ExitStack() as closing:
        _, parts = build_parts(config, ALONE, run=RunDirectory(Path(place)), closing=closing, keep=False)
        parts.side.bridge.sync(0)
        result = parts.evaluation.maybe_run(0)
    if result is None:
        raise ConfigError("there are no held-out problems to evaluate on", remedy="set data.eval_path")
    return result
