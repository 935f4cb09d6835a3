"""Configuration of each source of a run, as that of a run of this source alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lachesis.config.schema import EvaluationConfig, LachesisConfig, MixedSourceConfig


def single_configs(config: LachesisConfig) -> Mapping[str, LachesisConfig]:
    """Return the configuration of each source by name, in which nothing is of another source or of all together.

    A run without ``sources`` has its own alone, under an empty name.
    """
    if not config.sources:
        return {"": config}
    own = config.evaluation.model_copy(update={"benchmarks": []})
    return {one.name: _single(config, one).model_copy(update={"evaluation": own}) for one in config.sources}


def _single(config: LachesisConfig, one: MixedSourceConfig) -> LachesisConfig:
    set_here = {name: value for name, value in one.algorithm if value is not None}
    sections: dict[str, Any] = {"sources": [], "source": one.source, "data": one.data, "rewards": one.rewards}
    if set_here:
        sections["algorithm"] = config.algorithm.model_copy(update=set_here)
    if one.max_completion_length is not None:
        length = {"max_completion_length": one.max_completion_length}
        sections["sampling"] = config.sampling.model_copy(update=length)
    return config.model_copy(update=sections)


def checked_configs(config: LachesisConfig) -> Iterator[tuple[str, LachesisConfig]]:
    """Yield the configuration of each source with its place in the list, for rules.

    Evaluation is scheduled only for the sources that have held-out problems, if any has.
    """
    singles = [_single(config, one) for one in config.sources]
    held_out = any(map(_holds_out, singles))
    for index, single in enumerate(singles):
        if held_out and not _holds_out(single):
            best = {"checkpoint": single.checkpoint.model_copy(update={"keep_best": False})}
            single = single.model_copy(update={"evaluation": EvaluationConfig(), **best})
        yield f"sources[{index}]", single


def _holds_out(config: LachesisConfig) -> bool:
    return config.data.evaluates or getattr(config.source, "eval_tasks", 0) > 0
