"""Questions to the model of a run in this process, which the run answers between two steps."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lachesis.common.errors import LachesisError, StopRequested
from lachesis.common.types import Group, Message
from lachesis.engines.base import Engine
from lachesis.rollouts.datasets.formats import Problem
from lachesis.rollouts.datasets.rendering import render, tokenize
from lachesis.rollouts.generation import text_decoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompts = Sequence[str | Sequence[Message]]


@dataclass(slots=True)
class Questions:
    """A queue of prompts for a run, with the groups that answer them."""

    _waiting: queue.SimpleQueue[tuple[Prompts, dict[str, Any], Future[list[Group]]]] = field(
        default_factory=queue.SimpleQueue
    )

    def ask(self, prompts: Prompts, **options: Any) -> Future[list[Group]]:
        """Return a future of the groups; ``options`` are those of :func:`sample_prompts`."""
        answer: Future[list[Group]] = Future()
        self._waiting.put((prompts, options, answer))
        return answer

    def answer(self, sample: Callable[..., list[Group]]) -> None:
        """Answer all waiting questions. An error, such as a malformed message, is set on its own future."""
        while not self._waiting.empty():
            prompts, options, answer = self._waiting.get()
            try:
                answer.set_result(sample(prompts, **options))
            except (LachesisError, TypeError, ValueError) as error:
                answer.set_exception(error)

    def close(self) -> None:
        """Fail all waiting questions, because the run has ended."""

        def ended(prompts: Prompts, **options: Any) -> list[Group]:
            raise StopRequested("the run has ended", remedy="call run.sample() again: it then uses the trained model")

        self.answer(ended)


_OF_RUNS: dict[Path, Questions] = {}


def questions_of(run_dir: Path) -> Questions:
    """Return the queue of questions to the run in a directory."""
    return _OF_RUNS.setdefault(run_dir.absolute(), Questions())


def sample_prompts(
    prompts: Prompts,
    *,
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: Mapping[str, Any],
    **options: Any,
) -> list[Group]:
    """Sample as :meth:`lachesis.run.pieces.Pieces.sample` does; ``options`` are those of :meth:`Engine.sample`."""
    places = [f"prompts[{index}]" for index in range(len(prompts))]
    rendered = [
        render(
            Problem(place, 0, "prompts", prompt if isinstance(prompt, str) else list(prompt), {}),
            tokenizer=tokenizer,
            template_kwargs=template_kwargs,
        )
        for place, prompt in zip(places, prompts, strict=True)
    ]
    groups = engine.sample(tokenize(places, rendered, tokenizer), **options)
    decode = text_decoder(tokenizer)
    return [
        replace(
            group,
            prompt=replace(group.prompt, text=prompt.text, messages=prompt.messages),
            samples=tuple(
                replace(sample, text=text)
                for sample, text in zip(
                    group.samples, decode([one.completion_ids for one in group.samples]), strict=True
                )
            ),
        )
        for prompt, group in zip(rendered, groups, strict=True)
    ]
