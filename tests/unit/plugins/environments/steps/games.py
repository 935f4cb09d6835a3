"""Small environments in the interfaces that are stepped, and players of them over a fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from lachesis.common.objects import NamedObjects
from lachesis.common.types import GenerationRequest, SamplingParams
from lachesis.plugins.environments.section import StepsSourceConfig
from lachesis.plugins.environments.steps.build import step_players
from lachesis.rollouts.call_batcher import CallBatcher
from lachesis.rollouts.episodes import Played, PolicyAccess
from lachesis.rollouts.generation import SpecialTokens
from lachesis.rollouts.rewards.rewarder import Rewarder
from tests.fakes import FakeEngine
from tests.tiny import EOS_ID, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


class Scripted(FakeEngine):
    """Says these texts, one a turn, each with an end token unless it ends in ``|``."""

    def __init__(self, *turns: str) -> None:
        super().__init__(self.turn)
        self.turns = list(turns)

    def turn(self, request: GenerationRequest, index: int) -> Sequence[int]:
        text = self.turns.pop(0)
        return ids(text[:-1]) if text.endswith("|") else [*ids(text), EOS_ID]


def players(
    env: Any,
    engine: FakeEngine,
    *,
    max_tokens: int = 50,
    max_context: int = 200,
    rewarder: Rewarder | None = None,
    tokenizer: PreTrainedTokenizerFast = TOKENIZER,
    special_tokens: SpecialTokens = "remove",
    template_kwargs: dict[str, Any] | None = None,
    **settings: Any,
):
    """Players of an environment that is given as an object."""
    giving = NamedObjects()
    policy = PolicyAccess(
        calls=CallBatcher(engine, at_once=1), tokenizer=tokenizer, model="tiny",
        params=SamplingParams(max_tokens=max_tokens), max_context=max_context, vocab_size=len(tokenizer),
        special_tokens=special_tokens,
    )  # fmt: skip
    settings = {"environment": giving.give("env", env), "max_tasks": 3} | settings
    made = step_players(policy, StepsSourceConfig(**settings), rewarder=rewarder, template_kwargs=template_kwargs)
    made.keep = giving
    return made


def play(env: Any, *turns: str, task: int = 1, **options: Any) -> Played:
    """One episode of a task in which the model says these turns."""

    async def whole() -> Played:
        made = players(env, Scripted(*turns), **options)
        try:
            return await made.play(made.split()[0][task], seed=7)
        finally:
            await made.stop()

    return asyncio.run(whole())


class Count:
    """Gymnasium's: rewards the length of what is said, and ends with ``end``."""

    closed: list[int] = []  # noqa: RUF012

    def reset(self, seed: int, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        self.seed = seed
        return f"{seed}?", options

    def step(self, action: str) -> Any:
        return "ok", len(action), action == "end", False, {}

    def close(self) -> None:
        self.closed.append(self.seed)


class Tools:
    """TRL's."""

    def reset(self, **columns: Any) -> str:
        self.total = 0
        return " (begin)"

    def add(self, number: int) -> int:
        """
        Add a number.

        Args:
            number: which
        """
        if number < 0:
            raise ValueError("too little")
        self.total += number
        return self.total

    def get_reward(self) -> float:
        return float(self.total)
