"""Acceptance rates of servers' speculative decoding since the last reading. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from lachesis.engines.serving.backend import Drafted
from lachesis.engines.serving.operations import ServerInfo
from lachesis.metrics.values import Mean, MetricValue


class DraftRates:
    """Turns what servers have counted since their starts into rates."""

    def __init__(self) -> None:
        self._last: dict[str, Drafted] = {}
        self._generated: dict[str, int] = {}

    @property
    def guessing(self) -> bool:
        """True if a server that was read drafts tokens."""
        return bool(self._last)

    def read(self, infos: Iterable[ServerInfo]) -> dict[str, MetricValue]:
        """Rates of all servers together; of a server that is read for the first time nothing counts."""
        drafted = accepted = generated = passes = 0
        for info in infos:
            now = info.drafted
            if now is None:
                continue
            before, tokens = self._last.get(info.session_id, now), info.generated_tokens or 0
            drafted += now.tokens - before.tokens
            accepted += now.accepted - before.accepted
            passes += now.passes - before.passes
            generated += tokens - self._generated.get(info.session_id, tokens)
            self._last[info.session_id], self._generated[info.session_id] = now, tokens
        return {
            "draft_acceptance": Mean(accepted, drafted),
            "draft_share": Mean(accepted, generated),
            "draft_length": Mean(passes + accepted, passes),
        }
