"""How well servers guess tokens, since it was last read. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from lachesis.engines.serving.operations import ServerInfo
from lachesis.metrics.values import Mean, MetricValue


class DraftRates:
    """Turns what servers have counted since their starts into rates."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, int, int]] = {}

    @property
    def guessing(self) -> bool:
        """Whether a server that was read guesses tokens."""
        return bool(self._last)

    def read(self, infos: Iterable[ServerInfo]) -> dict[str, MetricValue]:
        """Rates of all servers together; of a server that is read for the first time nothing counts."""
        drafted = accepted = generated = 0
        for info in infos:
            if info.drafted is None:
                continue
            now = (info.drafted.tokens, info.drafted.accepted, info.generated_tokens or 0)
            before = self._last.get(info.session_id, now)
            drafted, accepted, generated = (
                total + new - old for total, new, old in zip((drafted, accepted, generated), now, before, strict=True)
            )
            self._last[info.session_id] = now
        return {"draft_acceptance": Mean(accepted, drafted), "draft_share": Mean(accepted, generated)}
