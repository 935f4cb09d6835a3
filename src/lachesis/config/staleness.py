"""How old samples become that are generated ahead of training."""

from __future__ import annotations


def oldest_sample(*, every_steps: int, depth: int, iterations: int) -> int:
    """Weight versions between the oldest sample and the policy of the last step that trains on it, at most.

    ``depth`` batches of ``iterations`` steps each go before its own, weights travel every ``every_steps`` steps,
    and its own batch has ``iterations`` - 1 further uses.
    """
    return depth * iterations + every_steps - 1 + iterations - 1
