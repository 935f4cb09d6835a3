"""The sums of two digits in the interface of verifiers' line 0.1, and a dialogue of several turns; a module with
``load_environment``, as its packages have it. Nothing here knows of the trainer."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset

MAX_GUESSES = 3


def right(completion: list[dict[str, Any]], answer: str) -> float:
    """1 for the right answer; of several guesses, a third less for each wrong one."""
    said = [message["content"].strip() for message in completion if message["role"] == "assistant"]
    return 1.0 - said.index(answer) / MAX_GUESSES if answer in said else 0.0


class Guess(vf.MultiTurnEnv):
    """A digit is to be found; each wrong guess is answered with ``+`` (it is larger) or ``=``."""

    async def env_response(self, messages: vf.Messages, state: vf.State, **_: Any) -> vf.Messages:
        guess, answer = str(messages[-1]["content"]).strip(), state["answer"]
        if guess == answer or not guess.isdecimal():
            state["final_env_response"] = [{"role": "user", "content": ""}]
            return state["final_env_response"]
        return [{"role": "user", "content": "+" if int(guess) < int(answer) else "="}]


def load_environment(kind: str = "sum") -> vf.Environment:
    """``sum`` is one answer, ``guess`` up to three."""
    rubric = vf.Rubric(funcs=[right])
    if kind == "guess":
        rows = [{"question": "0+9=", "answer": str(answer)} for answer in range(10)]
        return Guess(dataset=Dataset.from_list(rows), rubric=rubric, max_turns=MAX_GUESSES)
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)[::-1]} for a in range(10) for b in range(10)]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=rubric)
