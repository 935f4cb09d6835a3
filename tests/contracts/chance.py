"""What is lost by chance in contract tests: the same things each time, in whichever process."""

from __future__ import annotations

import hashlib


def share(*what: object) -> float:
    """A number from 0 to 1 that follows from what it is of."""
    return int(hashlib.sha256(repr(what).encode()).hexdigest()[:8], 16) / 0xFFFFFFFF


def lost(*what: object, chance: float = 0.15) -> bool:
    return share("lost", *what) < chance
