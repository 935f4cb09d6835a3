"""The game of guessing a digit on OpenEnv's own server: ``python -m tests.contracts.openenv_server LIBRARIES PORT``."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from pydantic import ConfigDict

from tests.paths import EXAMPLES


def main(libraries: str, port: int) -> None:
    sys.path.insert(0, str(EXAMPLES / "environments"))
    sys.path.append(libraries)  # last: what both have is that of the tests
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State
    from steps import GUESSES, QUESTION, answered

    class Guessed(Action):
        model_config = ConfigDict(coerce_numbers_to_str=True)  # verifiers reads a digit as a number

        guess: str

    class Hint(Observation):
        text: str = ""
        left: int = GUESSES

    class Digits(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Hint:
            if kwargs.get("fail"):
                raise ValueError("no game today")
            self.digit, self.guesses = (seed or 0) % 10, 0
            return Hint(text=QUESTION)

        def step(self, action: Guessed, timeout_s: float | None = None, **kwargs: Any) -> Hint:
            hint, reward, done = answered(action.guess, digit=self.digit, before=self.guesses)
            self.guesses += 1
            return Hint(text=hint, left=GUESSES - self.guesses, reward=reward, done=done)

        @property
        def state(self) -> State:
            return State()

    app = create_fastapi_app(Digits, Guessed, Hint, max_concurrent_envs=32)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
