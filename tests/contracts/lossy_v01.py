"""An environment of verifiers' line 0.1 that falls over in some rollouts, and whose judge does in others.

Three digits are to be said, and what they are worth follows from them.
"""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset

from tests.contracts.chance import lost, share


class Lossy(vf.MultiTurnEnv):
    failing = False

    async def env_response(self, messages: vf.Messages, state: vf.State, **_: Any) -> vf.Messages:
        said = [str(message["content"]) for message in messages if message["role"] == "assistant"]
        if self.failing and len(said) == 2 and lost("environment", state["answer"], said, chance=0.08):
            raise OSError("the environment fell over")
        return [{"role": "user", "content": "+"}]


def load_environment(failing: bool = False, together: bool = False) -> vf.Environment:
    """With ``together`` a second function looks at all rollouts of a group: how often what was said first was said."""

    def worth(completion: list[dict[str, Any]]) -> float:
        said = [message["content"] for message in completion if message["role"] == "assistant"]
        if failing and lost("judge", said, chance=0.08):
            raise ValueError("the judge fell over")
        return share(said)

    def agreement(completions: list[list[dict[str, Any]]], answer: str = "") -> list[float]:
        first = [completion[0]["content"] for completion in completions]
        return [first.count(one) / len(first) for one in first]

    rows = [{"question": f"{number}+0=", "answer": str(number)} for number in range(10)]
    functions = [worth, agreement] if together else [worth]
    made = Lossy(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=functions), max_turns=3)
    made.failing = failing
    return made
