"""Arithmetic of steps: the length of a run, the age of samples generated ahead, and nearest divisors."""

from __future__ import annotations

import math

from lachesis.common.errors import ConfigError
from lachesis.config.schema import LachesisConfig


def prompts_per_generation(config: LachesisConfig) -> int:
    """Return the number of prompts in one generation."""
    return config.batch.prompts_per_step * config.batch.steps_per_generation


def steps_per_batch(config: LachesisConfig) -> int:
    """Return the number of optimizer steps on the samples of one generation."""
    return config.batch.steps_per_generation * config.algorithm.num_iterations


def steps_of(config: LachesisConfig, *, epochs: float, problems: int) -> int:
    """Return the optimizer steps that train on each problem ``epochs`` times; at least one, rounded up."""
    batches = max(1, math.ceil(round(epochs * problems / prompts_per_generation(config), 9)))
    return batches * steps_per_batch(config)


def total_steps(config: LachesisConfig) -> int:
    """Return the number of optimizer steps of a run, including the supervised warm start."""
    return config.sft_steps + rollout_steps(config)


def rollout_steps(config: LachesisConfig) -> int:
    """Return ``run.steps``; :func:`with_steps` must have set it."""
    assert config.run.steps is not None, "with_steps sets it"
    return config.run.steps


def with_steps(config: LachesisConfig, *, problems: int) -> LachesisConfig:
    """Return the configuration with epochs converted to steps, given the number of training problems.

    These are ``run.steps`` and the intervals of checkpoints and evaluations.

    Raises:
        ConfigError: warm-up would take longer than the run.
    """
    changes: dict[str, object] = {}
    for name, section, unset in (
        ("checkpoint", config.checkpoint, config.checkpoint.every_steps is None),
        ("evaluation", config.evaluation, config.evaluation.every_steps == 0),
    ):
        if unset and section.every_epochs is not None:
            every = steps_of(config, epochs=section.every_epochs, problems=problems)
            changes[name] = section.model_copy(update={"every_steps": every, "every_epochs": None})
    return _with_length(config.model_copy(update=changes), problems=problems)


def _with_length(config: LachesisConfig, *, problems: int) -> LachesisConfig:
    if config.run.steps is not None or config.run.epochs is None:
        return config
    steps = steps_of(config, epochs=config.run.epochs, problems=problems)
    if config.optimizer.warmup_steps > steps:
        raise ConfigError(
            f"run.epochs {config.run.epochs:g} of {problems} problems are {steps} steps, but optimizer.warmup_steps is "
            f"{config.optimizer.warmup_steps}, so the learning rate would never reach its peak",
            remedy="lower optimizer.warmup_steps",
        )
    return config.model_copy(update={"run": config.run.model_copy(update={"steps": steps, "epochs": None})})


def oldest_sample(*, every_steps: int, depth: int, iterations: int) -> int:
    """Return the maximum staleness of a sample, in weight versions, at the last step that trains on it.

    ``depth`` batches of ``iterations`` steps each are trained on first, weights are transferred every ``every_steps``
    steps, and the sample's own batch has ``iterations`` - 1 further steps.
    """
    return depth * iterations + every_steps - 1 + iterations - 1


def batches_ahead(*, every_steps: int, depth: int, iterations: int, max_staleness: int | None) -> int:
    """Return how many batches, at most ``depth``, can be generated ahead if no sample may exceed ``max_staleness``.

    With 0, generation and training alternate; samples can still be stale because of infrequent transfers or several
    steps on a batch.
    """
    if max_staleness is None:
        return depth
    alone = oldest_sample(every_steps=every_steps, depth=0, iterations=iterations)
    return max(0, min(depth, (max_staleness - alone) // iterations))


def nearest_multiples(value: int, *, of: int) -> tuple[int, ...]:
    """Return the nearest positive multiples of ``of`` below and above ``value``, or ``value`` itself if it is one."""
    below, above = value // of * of, -(-value // of) * of
    return tuple(dict.fromkeys(number for number in (below, above) if number >= of))


def nearest_divisors(value: int, near: int) -> tuple[int, ...]:
    """Return the divisors of ``value``, 1 excluded, that are nearest to ``near`` from below and above."""
    divisors = [number for number in range(2, value + 1) if value % number == 0]
    below = [number for number in divisors if number <= near][-1:]
    above = [number for number in divisors if number >= near][:1]
    return tuple(dict.fromkeys(below + above))
