"""How well servers guess tokens, since it was last read, and where they stopped doing it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lachesis.engines.serving.backend import Drafted, DraftVerdict
from lachesis.engines.serving.operations import ServerInfo
from lachesis.metrics.values import Mean, MetricValue


class DraftRates:
    """Turns what servers have counted since their starts into rates."""

    def __init__(self) -> None:
        self._last: dict[str, Drafted] = {}
        self._generated: dict[str, int] = {}
        self._drafting: dict[tuple[str, int], bool] = {}

    @property
    def guessing(self) -> bool:
        """Whether a server that was read guesses tokens."""
        return bool(self._last)

    def read(self, infos: Iterable[ServerInfo]) -> dict[str, MetricValue]:
        """Rates of all servers together; of a server that is read for the first time nothing counts."""
        drafted = accepted = generated = passes = steps = drafted_steps = 0
        fast = plain = 0.0
        for info in infos:
            now = info.drafted
            if now is None:
                continue
            before, tokens = self._last.get(info.session_id, now), info.generated_tokens or 0
            drafted += now.tokens - before.tokens
            accepted += now.accepted - before.accepted
            passes += now.passes - before.passes
            steps += now.steps - before.steps
            drafted_steps += now.drafted_steps - before.drafted_steps
            generated += tokens - self._generated.get(info.session_id, tokens)
            fast += sum(verdict.drafted for verdict in now.verdicts[-1:])
            plain += sum(verdict.plain for verdict in now.verdicts[-1:])
            self._last[info.session_id], self._generated[info.session_id] = now, tokens
        return {
            "draft_acceptance": Mean(accepted, drafted),
            "draft_share": Mean(accepted, generated),
            "draft_length": Mean(passes + accepted, passes),
            "draft_steps": Mean(drafted_steps, steps),
            "draft_speedup": Mean(fast, plain),
        }

    def changes(self, infos: Iterable[ServerInfo]) -> Iterator[str]:
        """A sentence for each size of the batch that servers have stopped guessing with, or guess with again."""
        for info in infos:
            for verdict in () if info.drafted is None else info.drafted.verdicts:
                size = (info.session_id, verdict.sequences)
                if verdict.drafting is not self._drafting.get(size, True):
                    yield f"the engine at {info.url} {_said(verdict)}"
                self._drafting[size] = verdict.drafting


def _said(verdict: DraftVerdict) -> str:
    most = 2 * verdict.sequences - 1
    sequences = "one sequence" if most == 1 else f"{verdict.sequences} to {most} sequences"
    speeds = f"{verdict.drafted:,.0f} tokens/s with guesses, {verdict.plain:,.0f} without"
    if verdict.drafting:
        return f"guesses tokens again with {sequences} at a time: {speeds}"
    return (
        f"stops guessing tokens with {sequences} at a time: {speeds}; if it stops wherever it is busy, remove "
        "engine.speculative: vLLM schedules ahead only without it"
    )
