"""Several turns with a tool: a digit is guessed, and a wrong guess is answered by ``+`` (it is more) or ``=`` (less).

lachesis env examples/environments/guess.py:Guess process --openai.base_url http://127.0.0.1:9001
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from lachesis.environments.base import Environment
from lachesis.environments.records import Trajectory
from lachesis.environments.settings import EnvironmentConfig
from lachesis.environments.tokenizer import text_of
from pydantic import Field

from lachesis.common.types import SamplingParams

# A digit from 0 to 9.
QUESTION = "0+9="


class GuessConfig(EnvironmentConfig):
    """The section ``env``: every field is a flag, ``--env.max_turns 3``."""

    group_size: int = Field(8, ge=1, description="completions of one problem, scored against each other")
    max_token_length: int = Field(64, ge=1, description="most tokens of a rollout, prompt included")
    max_turns: int = Field(4, ge=1, description="most guesses")


class Guess(Environment[int, GuessConfig]):
    """A score of 1 for a right guess, less a tenth for each guess before it; 0 without one."""

    name = "guess"
    config_class = GuessConfig

    async def setup(self) -> None:
        self._source = random.Random(self.config.seed)

    async def get_next_item(self) -> int:
        return self._source.randrange(10)

    async def collect_trajectory(self, item: int, *, params: SamplingParams) -> Trajectory:
        trajectory = Trajectory(messages=[{"role": "user", "content": QUESTION}])
        trajectory.give(self.tokenizer.encode(QUESTION))  # given: not trained on
        for _ in range(self.config.max_turns):
            turn = replace(params, max_tokens=min(1, self.room(len(trajectory.tokens), params)))
            (sampled,) = await self.client.generate(trajectory.tokens, params=turn)
            trajectory.sample(sampled)  # sampled: trained on, with the logprobs that the server gave
            guess = text_of(self.tokenizer, sampled.token_ids)
            trajectory.messages.append({"role": "assistant", "content": guess})
            if guess == str(item) or not guess.isdecimal():
                break
            hint = "+" if int(guess) < item else "="
            trajectory.give(self.tokenizer.encode(hint, add_special_tokens=False))
            trajectory.messages.append({"role": "tool", "content": hint})
        return trajectory

    async def score(self, item: int, trajectories: Sequence[Trajectory]) -> Sequence[float]:
        return [self._score(item, trajectory) for trajectory in trajectories]

    def _score(self, item: int, trajectory: Trajectory) -> float:
        guesses = [message["content"] for message in trajectory.messages if message["role"] == "assistant"]
        return 1.0 - 0.1 * guesses.index(str(item)) if str(item) in guesses else 0.0
