"""Scores for whole groups: samples that could not be judged are left out and counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lachesis.common.errors import RewardError
from lachesis.common.types import Group
from lachesis.metrics.meters import Means, Tally
from lachesis.rollouts.failures import note_excluded, note_failure
from lachesis.rollouts.prompt_source import too_few
from lachesis.rollouts.rewards.attempts import Item
from lachesis.rollouts.rewards.functions import Excluded
from lachesis.rollouts.rewards.rewarder import Rewarder


class Judge:
    """Judge that scores groups by a run's reward functions. Any thread may ask.

    Args:
        fewest: the samples that a group needs; a group with fewer left is dropped.
        counts: gets ``tokens_generated`` (also those of dropped groups), ``dropped_groups``, ``reward_errors`` and, for
            samples that could not be judged, ``rollout_failures`` and ``rollout_failures/CAUSE``.
    """

    def __init__(self, rewarder: Rewarder, *, fewest: int, counts: Tally) -> None:
        self.rewarder = rewarder
        self._fewest = fewest
        self._counts = counts
        self._logged = Means()

    def score(self, items: Sequence[Item]) -> list[Group | RewardError]:
        """Return each group with its rewards, in order, or why it was dropped. Raises as :meth:`Rewarder.score`."""
        scored = self.rewarder.score([item.group for item in items], extras=[item.extras for item in items])
        lost = scored.errors[-1] if scored.errors else None
        outcomes: list[Group | RewardError] = [lost or too_few(item.group.prompt, 0) for item in items]
        errors = list(scored.errors)
        for place, group, excluded in zip(scored.kept, scored.groups, scored.excluded, strict=True):
            left = self._judged(group, excluded)
            if len(left.samples) < self._fewest:
                errors.append(too_few(left.prompt, len(left.samples)))
            outcomes[place] = left if len(left.samples) >= self._fewest else errors[-1]
        for error in errors:
            note_failure(error.message, cause="reward")
        self._counts.add(
            tokens_generated=sum(sample.num_learned for item in items for sample in item.group.samples),
            dropped_groups=sum(isinstance(one, RewardError) for one in outcomes),
            reward_errors=len(errors),
        )
        self._logged.add(scored.metrics, weight=len(items))
        return outcomes

    def take_means(self) -> dict[str, float]:
        """Return the means over groups, since the last call, of the metrics that reward functions logged."""
        return self._logged.take()

    def _judged(self, group: Group, excluded: Mapping[int, Excluded]) -> Group:
        """Leave out the samples that could not be judged."""
        if not excluded:
            return group
        note_excluded(group, excluded)
        for reason in excluded.values():
            self._counts.add(**{"rollout_failures": 1, f"rollout_failures/{reason.counted}": 1})
        return group.without(excluded)
