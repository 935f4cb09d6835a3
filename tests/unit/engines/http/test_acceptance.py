from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lachesis.engines.http.acceptance import DraftRates
from lachesis.engines.serving.backend import Drafted, DraftVerdict


def info(session: str, drafted: Drafted | None, generated: int = 0) -> Any:
    return SimpleNamespace(url=f"http://{session}", session_id=session, drafted=drafted, generated_tokens=generated)


def values(rates: DraftRates, *infos: Any) -> tuple[float | None, float | None]:
    read = rates.read(infos)
    return read["draft_acceptance"].value(), read["draft_share"].value()


def verdict(sequences: int, *, drafting: bool) -> DraftVerdict:
    return DraftVerdict(sequences, drafting, drafted=3000.0 if drafting else 1500.0, plain=2000.0)


def test_rates_are_of_what_came_since_the_last_reading():
    rates = DraftRates()
    assert not rates.guessing
    assert values(rates, info("a", Drafted(100, 100), 500), info("b", Drafted(0, 0), 0)) == (None, None)
    assert rates.guessing
    assert values(rates, info("a", Drafted(140, 110), 540), info("b", Drafted(10, 5), 10)) == (0.3, 0.3)
    assert values(rates, info("a", Drafted(140, 110), 560), info("b", Drafted(10, 5), 10)) == (None, 0.0)


def test_lengths_steps_and_speeds():
    rates = DraftRates()
    first = rates.read([info("a", Drafted(0, 0, 0, 50, 50))])
    assert {first[name].value() for name in ("draft_length", "draft_steps", "draft_speedup")} == {None}
    measured = (verdict(64, drafting=True), verdict(1, drafting=False))
    read = rates.read([info("a", Drafted(40, 15, passes=10, steps=150, drafted_steps=75, verdicts=measured))])
    assert read["draft_length"].value() == 2.5
    assert read["draft_steps"].value() == 0.25
    assert read["draft_speedup"].value() == 0.75, "that of the size that was measured last"


def test_servers_that_guess_nothing_are_not_asked_again():
    rates = DraftRates()
    rates.read([info("a", None, 7)])
    assert not rates.guessing
    assert list(rates.changes([info("a", None, 7)])) == []


def test_a_change_of_mind_is_said_once():
    rates = DraftRates()

    def said(session: str, *verdicts: DraftVerdict) -> list[str]:
        return list(rates.changes([info(session, Drafted(0, 0, verdicts=verdicts))]))

    assert said("a", verdict(1, drafting=True)) == [], "it guesses until it is found to be slower"
    stops = (
        "the engine at http://a stops guessing tokens with 64 to 127 sequences at a time: 1,500 tokens/s with guesses"
    )
    assert said("a", verdict(1, drafting=True), verdict(64, drafting=False)) == [
        f"{stops}, 2,000 without; if it stops wherever it is busy, remove engine.speculative: vLLM schedules ahead "
        "only without it"
    ]
    assert said("a", verdict(1, drafting=True), verdict(64, drafting=False)) == []
    assert len(said("b", verdict(64, drafting=False))) == 1, "another server"
    (again,) = said("a", verdict(64, drafting=True))
    assert again.startswith("the engine at http://a guesses tokens again with 64 to 127 sequences")
    assert "with one sequence at a time" in said("a", verdict(1, drafting=False))[0]
