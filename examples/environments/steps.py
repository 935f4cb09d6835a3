"""A digit is guessed, and a wrong guess is answered by ``+`` (it is more) or ``=`` (less): a game that is stepped.

The same game in the interfaces of two libraries, neither of which it needs. ``steps.yaml`` trains on the first, and

    lachesis env eval examples/environments/steps.py:Guess --engine http://127.0.0.1:9001 --env.turn_tokens 1

tries it.
"""

from __future__ import annotations

from typing import Any

# A digit from 0 to 9.
QUESTION = "0+9="
GUESSES = 3


def answered(guess: str, *, digit: int, before: int) -> tuple[str, float, bool]:
    """The hint, the reward, and whether the game is over; a right guess is worth a third less for each before it."""
    if guess == str(digit):
        return "", 1.0 - before / GUESSES, True
    over = not guess.isdecimal() or before + 1 == GUESSES
    return "+" if guess.isdecimal() and int(guess) < digit else "=", 0.0, over


class Guess:
    """Gymnasium's methods, over text. A task is a seed."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.digit = (seed or 0) % 10
        self.guesses = 0
        return QUESTION, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        hint, reward, over = answered(action, digit=self.digit, before=self.guesses)
        self.guesses += 1
        return hint, reward, over, False, {}


class GuessTools:
    """TRL's ``environment_factory``: the public methods are tools, and ``get_reward`` scores the state."""

    def reset(self, seed: int, **columns: Any) -> str:
        self.digit, self.guesses, self.reward = seed % 10, 0, 0.0
        return "Which digit is it?"

    def guess(self, digit: int) -> str:
        """
        Guess the digit.

        Args:
            digit: from 0 to 9.

        Returns:
            "right", "more" or "less"
        """
        if self.guesses == GUESSES:
            raise ValueError("the game is over")
        hint, reward, _ = answered(str(digit), digit=self.digit, before=self.guesses)
        self.guesses += 1
        self.reward += reward
        return {"": "right", "+": "more", "=": "less"}[hint]

    def get_reward(self) -> float:
        return self.reward
