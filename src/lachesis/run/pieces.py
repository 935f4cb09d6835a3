"""The parts of a run for users who write their own training loop: policy, engine, bridge and feed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

from lachesis.bridges.base import Bridge
from lachesis.common.errors import ConfigError
from lachesis.common.objects import NamedObject
from lachesis.common.types import EvalResult, Group, Message
from lachesis.config.objects import RewardArgument, load_objects, require_steps
from lachesis.config.rules import check
from lachesis.config.schema import LachesisConfig
from lachesis.config.schema.model import NoAdapterConfig
from lachesis.engines.base import Engine
from lachesis.pipeline.feed import Feed
from lachesis.run.context import ALONE
from lachesis.run.directory import RunDirectory, noted_step
from lachesis.run.engine import build_engine_side, unclaimed_on_error
from lachesis.run.launch import seed_everything, set_up
from lachesis.run.parts import build_policy, check_custom_parts
from lachesis.run.questions import sample_prompts
from lachesis.run.train import build_parts, run_place
from lachesis.train.batch import Batch
from lachesis.train.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """The parts of a training loop; ``close`` them, or use them in a ``with`` block.

    ``feed`` yields packed batches of scored groups; it is None unless the configuration has data and rewards, or
    environments.
    """

    config: LachesisConfig
    policy: Policy
    engine: Engine
    bridge: Bridge[Policy]
    feed: Feed[Batch] | None
    _closing: ExitStack = field(repr=False)
    _given: tuple[NamedObject, ...] = field(repr=False)

    def sample(
        self, prompts: Sequence[str | Sequence[Message]], *, n: int = 1, max_tokens: int, seed: int = 0, **further: Any
    ) -> list[Group]:
        """Sample completions of prompts, which are texts or lists of messages. Groups and samples include their texts.

        Messages go through the chat template, with a generation prompt, or to continue the last message if it is the
        assistant's. A text is continued as it is.

        Args:
            further: further arguments of :meth:`Engine.sample`.

        Raises:
            DataError: a prompt is empty, or messages are malformed, or the tokenizer has no chat template for them.
            EngineError, DeadlineExceeded: as :meth:`Engine.sample`.
        """
        return sample_prompts(
            prompts,
            engine=self.engine,
            tokenizer=self.policy.tokenizer,
            template_kwargs=self.config.data.chat_template_kwargs,
            n=n,
            max_tokens=max_tokens,
            seed=seed,
            **further,
        )

    def close(self) -> None:
        """Stop the engine and everything else that was started. Idempotent."""
        self._closing.close()

    def __enter__(self) -> Pieces:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def parts(
    config: str | Path | Mapping[str, Any] | None = None,
    *,
    model: str | Path | Mapping[str, Any] | None = None,
    data: Any = None,
    rewards: RewardArgument | None = None,
    **keys: Any,
) -> Pieces:
    """Build the policy, its engine and the bridge between them as configured, without training.

    No run directory is made: the loop decides what to measure and keep. ``run.steps`` may be left out if the learning
    rate does not depend on it.

    Args:
        config, model, data, rewards, **keys: as :func:`lachesis.train`; ``data`` and ``rewards`` for a feed.

    Raises:
        ConfigError: a key is invalid, or only one of data and rewards is given.
        LachesisError: another of its subclasses, where a part cannot be built.
    """
    short = {"model": model, "data": data, "rewards": rewards}
    found = load_objects(
        config, {name: value for name, value in short.items() if value is not None} | keys, complete=False
    )
    feeds = _feeds(found.loaded.config)
    built = found.loaded.config if feeds and found.loaded.config.run.epochs else require_steps(found.loaded.config)
    check(built)
    seed_everything(built.run.seed)
    set_up(built)
    check_custom_parts(built)
    with ExitStack() as closing:
        return _pieces(built, feeds=feeds, closing=closing, given=found.given)


def _feeds(config: LachesisConfig) -> bool:
    """Return True if the configuration has a source of groups. Raise ConfigError if it has only half of one."""
    if config.source.kind == "atropos" or config.sources:
        return True
    has_data, has_rewards = config.data.path is not None, bool(config.rewards.functions)
    if has_data != has_rewards:
        there, missing = ("data", "rewards") if has_data else ("rewards", "data")
        raise ConfigError(
            f"{there} without {missing}: a feed needs both",
            remedy=f"give {missing} as well, or leave out {there} and make the groups in your loop",
        )
    return has_data


def _pieces(config: LachesisConfig, *, feeds: bool, closing: ExitStack, given: Sequence[NamedObject] = ()) -> Pieces:
    feed: Feed[Batch] | None = None
    run = RunDirectory(config.run.directory)  # where servers and bridges that save exchange files with this process
    if config.engine.place != "trainer":
        run.path.mkdir(parents=True, exist_ok=True)
    if feeds:
        config, built = build_parts(config, ALONE, run=run, closing=closing)
        policy, bridge, feed = built.policy, built.side.bridge, built.feed
    else:
        place = run_place(run)
        with unclaimed_on_error(config, owner=place.owner, claimed_before=False):
            side = build_engine_side(config, place=place)
            closing.callback(side.close)
            policy, bridge = side.bridge.prepare(partial(build_policy, config, weights=side.weights)), side.bridge
    return Pieces(
        config=config,
        policy=policy,
        engine=bridge.engine,
        bridge=bridge,
        feed=feed,
        _closing=closing.pop_all(),
        _given=tuple(given),
    )


def evaluate_model(config: LachesisConfig, model: Path | None) -> EvalResult:
    """Evaluate a model, or the one that the configuration starts from, as a run evaluates before its first step.

    Args:
        config: of a run, with held-out problems.
        model: directory of a whole model, or of an adapter; ``None`` evaluates ``model.path``.

    Raises:
        ConfigError: there are no held-out problems.
        LachesisError: another of its subclasses, where a part cannot be built.
    """
    config = config if model is None else _around(config, model)
    seed_everything(config.run.seed)
    set_up(config)
    with TemporaryDirectory(prefix="lachesis-evaluation-") as place, ExitStack() as closing:
        _, parts = build_parts(config, ALONE, run=RunDirectory(Path(place)), closing=closing)
        parts.side.bridge.sync(0)
        result = parts.evaluation.maybe_run(0)
    if result is None:
        raise ConfigError("there are no held-out problems to evaluate on", remedy="set data.eval_path")
    step = None if model is None else noted_step(model)
    return result if step is None else replace(result, step=step)


def trained_parts(config: LachesisConfig, model: Path) -> Pieces:
    """Build the parts of a run around a model that it has trained, to sample from it.

    Raises:
        LachesisError: one of its subclasses, where a part cannot be built.
    """
    config = _around(config, model)
    set_up(config)
    with ExitStack() as closing:
        return _pieces(config, feeds=False, closing=closing)


def _around(config: LachesisConfig, model: Path) -> LachesisConfig:
    """Return the configuration with another model, or another adapter, if the directory has one."""
    if (model / "adapter_config.json").is_file():
        return config.model_copy(update={"adapter": config.adapter.model_copy(update={"path": str(model)})})
    trained = config.model.model_copy(update={"path": str(model), "revision": None})
    return config.model_copy(update={"model": trained, "adapter": NoAdapterConfig(kind="none")})
