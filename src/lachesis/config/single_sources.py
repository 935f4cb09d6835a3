"""The configuration of each source of a run, as if the run had that source alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lachesis.config.schema import EvaluationConfig, LachesisConfig, MixedSourceConfig


def single_configs(config: LachesisConfig) -> Mapping[str, LachesisConfig]:
    """Return one configuration for each source by name, without the settings of the other sources.

    A run without ``sources`` has one entry, its own configuration, under an empty name.
    """
    if not config.sources:
        return {"": config}
    own = config.evaluation.model_copy(update={"benchmarks": []})
    return {one.name: _single(config, one).model_copy(update={"evaluation": own}) for one in config.sources}


def _single(config: LachesisConfig, one: MixedSourceConfig) -> LachesisConfig:
    set_here: dict[str, Any] = {name: value for name, value in one.algorithm if value is not None}
    if config.algorithm.teachers:
        set_here |= {"teacher": config.algorithm.teachers.get(one.name), "teachers": {}}
    sections: dict[str, Any] = {"sources": [], "source": one.source, "data": one.data, "rewards": one.rewards}
    if set_here:
        sections["algorithm"] = config.algorithm.model_copy(update=set_here)
    if one.max_completion_length is not None:
        length = {"max_completion_length": one.max_completion_length}
        sections["sampling"] = config.sampling.model_copy(update=length)
    return config.model_copy(update=sections)


def checked_configs(config: LachesisConfig) -> Iterator[tuple[str, LachesisConfig]]:
    """Yield the configuration of each source with its place in ``sources``, for the rules.

    If any source has held-out problems, evaluation keys are kept only for sources that have some.
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
