"""A game of two turns: each number above 40 is worth a half."""

from __future__ import annotations

from typing import Any


class High:
    """Gymnasium's methods, over text."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.turns = 0
        return f"{2 + (seed or 0) % 8}*3", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turns += 1
        won = action.isdecimal() and int(action) > 40
        return "9*9", 0.5 * won, self.turns == 2, False, {}
