"""Prompts of a policy that is its own teacher: their extra text comes from the problem's row or its group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from lachesis.common.types import Group, Prompt
from lachesis.config.schema import LachesisConfig, TeacherConfig
from lachesis.config.schema.training import placeholders
from lachesis.rollouts.datasets.formats import Problem
from lachesis.rollouts.datasets.rendering import render, tokenize
from lachesis.train.losses.teacher import shares


@dataclass(frozen=True, slots=True, eq=False)
class OwnPrompts:
    """Writer of the teacher's prompts.

    Attributes:
        options: the prompts, and the environments that are taught.
        tokenizer: the policy's.
        template_kwargs: variables of its chat template.
    """

    options: TeacherConfig
    tokenizer: PreTrainedTokenizerBase
    template_kwargs: Mapping[str, Any]

    def teach(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups, with the teacher's prompt in each sample that has one.

        Raises:
            DataError: the chat template fails.
        """
        weight = shares(self.options)
        return [self._of_group(group) if weight(group).teacher else group for group in groups]

    def _of_group(self, group: Group) -> Group:
        known: dict[str, tuple[int, ...]] = {}  # most samples of a group share a teacher
        samples = [
            sample if text is None else replace(sample, teacher_prompt_ids=self._ids(group.prompt, text, known))
            for place, sample in enumerate(group.samples)
            for text in [self.text(group, place)]
        ]
        return replace(group, samples=tuple(samples))

    def text(self, group: Group, place: int) -> str | None:
        """Return the first prompt whose names have a value for the sample at ``place``; None without one."""
        prompt = group.prompt
        values = {name: str(value) for name, value in prompt.columns.items() if value not in (None, "")}
        values["prompt"] = prompt.text if prompt.messages is None else str(prompt.messages[-1]["content"])
        others = (sample for other, sample in enumerate(group.samples) if other != place)
        right = (one.text for one in others if one.reward is not None and one.reward >= self.options.success)
        if (solution := next(right, None)) is not None:
            values["solution"] = solution
        fitting = (text for text in self.options.prompts if placeholders(text) <= values.keys())
        return next((text.format_map(values) for text in fitting), None)

    def _ids(self, prompt: Prompt, text: str, known: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
        if text not in known:
            before = prompt.messages
            said = text if before is None else [*before[:-1], {**before[-1], "content": text}]
            place = f"the teacher's prompt for problem {prompt.id}"
            problem = Problem(place=place, turn=0, column="algorithm.teacher.prompts", prompt=said, columns={})
            rendered = render(problem, tokenizer=self.tokenizer, template_kwargs=self.template_kwargs)
            (known[text],) = tokenize([place], [rendered], self.tokenizer)
        return known[text]


def build_teach(
    config: LachesisConfig, *, tokenizer: PreTrainedTokenizerBase, closing: ExitStack
) -> Callable[[Sequence[Group]], Sequence[Group]]:
    """Return the function that writes prompts of ``algorithm.teacher.prompts``; ``closing`` gets nothing to close."""
    assert config.algorithm.teacher is not None, "the caller has checked"
    return OwnPrompts(config.algorithm.teacher, tokenizer, config.data.chat_template_kwargs).teach
