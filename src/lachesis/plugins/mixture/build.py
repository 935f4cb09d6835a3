"""Runs over several sources: data, rewards and players of each, and one feed from the mixture of their groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from lachesis.common.errors import RewardError
from lachesis.common.types import EvalResult, Finding, Group, Prompt, Sample
from lachesis.config.schema import LachesisConfig
from lachesis.config.single_sources import single_configs
from lachesis.engines.base import Engine
from lachesis.plugins.mixture.source import Ingredient, SourceMixture
from lachesis.rollouts.evaluate import Evaluates
from lachesis.rollouts.rewards.rewarder import Rewarder
from lachesis.run.feeds import (
    GroupsBuilt,
    Rollouts,
    Teach,
    advantage_assigner,
    build_groups,
    feed_from,
    signal_function,
)
from lachesis.run.parts import build_evaluation
from lachesis.run.sources import load_data, rewarder_of, template_findings
from lachesis.train.policy import Policy

Keep = Callable[[int, Sequence[Group]], None]
"""Function that gets the step and the scored groups of an evaluation."""

Assign = Callable[[Sequence[Group]], list[Group]]
"""Function that sets the advantages of a step's groups."""


@dataclass(frozen=True, slots=True)
class LoadedSource:
    """Source of a mixture with its data and its rewarder; ``config`` is that of a run with this source alone."""

    config: LachesisConfig
    problems: Sequence[Prompt]
    held_out: Sequence[Prompt]
    rewarder: Rewarder | None


@dataclass(frozen=True, slots=True)
class MixedEvaluator:
    """Evaluator on the held-out problems of several sources: each alone, and all together.

    Args:
        evaluators: of the sources that have held-out problems, by name.
        done: called with the step once all are done.
    """

    evaluators: Mapping[str, Evaluates]
    done: Callable[[int], None] = lambda step: None

    def run(self, step: int) -> EvalResult:
        """Return the mean over all problems, and the results of each source. Raises as :meth:`Evaluator.run`."""
        found = {name: evaluator.run(step) for name, evaluator in self.evaluators.items()}
        self.done(step)
        results = list(found.values())
        solved = [one.accuracy if one.pass_at_k is None else one.pass_at_k for one in results]
        several = max(one.samples for one in results)

        def mean(values: Sequence[float]) -> float:
            weighted = (value * one.problems for value, one in zip(values, results, strict=True))
            return sum(weighted) / sum(one.problems for one in results)

        return EvalResult(
            step=step,
            accuracy=mean([one.accuracy for one in results]),
            mean_reward=mean([one.mean_reward for one in results]),
            problems=sum(one.problems for one in results),
            mean_length=mean([one.mean_length for one in results]),
            seconds=sum(one.seconds for one in results),
            samples=several,
            pass_at_k=mean(solved) if several > 1 else None,
            by_source={
                name: {"accuracy": one.accuracy, "mean_reward": one.mean_reward, "problems": one.problems}
                for name, one in found.items()
            },
        )


@dataclass(frozen=True, slots=True)
class LoadedMixture:
    """Sources of a run, by name, before there is a policy."""

    config: LachesisConfig
    sources: Mapping[str, LoadedSource]
    closing: ExitStack

    @property
    def problems(self) -> list[Prompt]:
        """Return the problems of all sources to train on."""
        return [problem for one in self.sources.values() for problem in one.problems]

    def findings(self, tokenizer: PreTrainedTokenizerBase) -> list[Finding]:
        """Return the findings about each source's prompts."""
        return [
            replace(finding, message=f"source {name}: {finding.message}")
            for name, one in self.sources.items()
            for finding in template_findings(one.config, one.problems, tokenizer)
        ]

    def build(self, *, policy: Policy, engine: Engine, teach: Teach, keep: Keep | None) -> Rollouts:
        """Build the feed of packed batches from the mixture of the sources, and their evaluation.

        Args:
            policy: the trained model.
            engine: the engine that generates. teach: adds the logprobs of a teacher outside the trainer to groups.
            keep: called with the groups of each evaluation, of all sources.
        """
        evaluated: list[Group] = []
        built: dict[str, GroupsBuilt] = {}
        evaluators: dict[str, Evaluates] = {}
        for name, one in self.sources.items():
            shared: dict[str, Any] = {"policy": policy, "engine": engine, "rewarder": one.rewarder}
            built[name] = build_groups(one.config, problems=one.problems, **shared)
            note, own = partial(_note, evaluated, name), built[name].evaluator
            evaluation = build_evaluation(one.config, held_out=one.held_out, keep=note, evaluator=own, **shared)
            self.closing.callback(evaluation.close)
            if evaluation.evaluator is not None:
                evaluators[name] = evaluation.evaluator
        entries = {one.name: one for one in self.config.sources}
        signals = {name: signal_function(one.config) for name, one in self.sources.items()}
        feed = feed_from(
            SourceMixture(
                {
                    name: Ingredient(one.source, entries[name].weight, entries[name].max_unfinished)
                    for name, one in built.items()
                }
            ),
            self.config,
            policy=policy,
            teach=teach,
            advantages=assign_by_source(
                {name: advantage_assigner(one.config, policy=policy) for name, one in self.sources.items()},
                {name: len(one.reward_names) for name, one in built.items()},
            ),
            signal=lambda group: signals[group.prompt.source](group),
        )

        def keep_all(step: int) -> None:
            if keep is not None:
                keep(step, tuple(evaluated))
            evaluated.clear()

        names = [f"{source}/{name}" for source, one in built.items() for name in one.reward_names]
        return Rollouts(feed, names, MixedEvaluator(evaluators, keep_all) if evaluators else None)


def load_mixture(config: LachesisConfig, *, closing: ExitStack, stop_requested: Callable[[], bool]) -> LoadedMixture:
    """Load the data and the rewards of each of ``sources``. ``closing`` gets objects to close.

    Raises as :func:`load_data`.
    """
    loaded: dict[str, LoadedSource] = {}
    for name, single in single_configs(config).items():
        problems, held_out = load_data(single)
        rewarder = rewarder_of(
            single, problems=problems, held_out=held_out, closing=closing, stop_requested=stop_requested
        )
        loaded[name] = LoadedSource(single, problems, held_out, rewarder)
    return LoadedMixture(config, loaded, closing)


def _note(evaluated: list[Group], name: str, step: int, groups: Sequence[Group]) -> None:
    evaluated += [replace(group, prompt=replace(group.prompt, source=name)) for group in groups]


def assign_by_source(assigners: Mapping[str, Assign], rewards: Mapping[str, int]) -> Assign:
    """Return a function that sets the advantages of each source's groups by that source's options.

    Normalizations over the batch cover the groups of one source. If all functions of a source abstained, its groups'
    advantages are 0. Afterwards each sample has a reward for the functions of all sources, in their
    order: ``None`` for those of other sources.

    Args:
        assigners: of each source.
        rewards: number of reward functions of each source.
    """

    def assign(groups: Sequence[Group]) -> list[Group]:
        done: dict[int, Group] = {}
        if not any(_is_scored(group) for group in groups):
            raise RewardError(
                f"the reward functions of all sources abstained on all {len(groups)} groups of this step",
                remedy="make at least one function judge, or train on more prompts a step (batch.prompts_per_step)",
            )
        for name, assigner in assigners.items():
            places = [place for place, group in enumerate(groups) if group.prompt.source == name]
            mine = [groups[place] for place in places]
            scored = any(map(_is_scored, mine))
            done |= zip(places, assigner(mine) if scored else map(_without_signal, mine), strict=True)
        return [_padded(done[place], rewards) for place in range(len(groups))]

    return assign


def _is_scored(group: Group) -> bool:
    return any(value is not None for sample in group.samples for value in sample.rewards)


def _without_signal(group: Group) -> Group:
    samples = [replace(sample, advantage=0.0) for sample in group.samples]
    return replace(group, samples=tuple(samples))


def _padded(group: Group, rewards: Mapping[str, int]) -> Group:
    names = list(rewards)
    mine = names.index(group.prompt.source)
    before, after = sum(rewards[name] for name in names[:mine]), sum(rewards[name] for name in names[mine + 1 :])

    def whole(sample: Sample) -> Sample:
        row = (*(None,) * before, *sample.rewards, *(None,) * after)
        return replace(sample, rewards=row)

    replaced = None if group.replaces is None else _padded(group.replaces, rewards)
    return replace(group, samples=tuple(map(whole, group.samples)), replaces=replaced)
