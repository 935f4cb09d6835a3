from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lachesis.engines.http.acceptance import DraftRates
from lachesis.engines.serving.backend import Drafted


def info(session: str, drafted: Drafted | None, generated: int = 0) -> Any:
    return SimpleNamespace(url=f"http://{session}", session_id=session, drafted=drafted, generated_tokens=generated)


def values(rates: DraftRates, *infos: Any) -> tuple[float | None, float | None]:
    read = rates.read(infos)
    return read["draft_acceptance"].value(), read["draft_share"].value()


def test_rates_are_of_what_came_since_the_last_reading():
    rates = DraftRates()
    assert not rates.guessing
    assert values(rates, info("a", Drafted(100, 100), 500), info("b", Drafted(0, 0), 0)) == (None, None)
    assert rates.guessing
    assert values(rates, info("a", Drafted(140, 110), 540), info("b", Drafted(10, 5), 10)) == (0.3, 0.3)
    assert values(rates, info("a", Drafted(140, 110), 560), info("b", Drafted(10, 5), 10)) == (None, 0.0)


def test_lengths():
    rates = DraftRates()
    assert rates.read([info("a", Drafted(0, 0, 0))])["draft_length"].value() is None
    assert rates.read([info("a", Drafted(40, 15, passes=10))])["draft_length"].value() == 2.5


def test_servers_that_guess_nothing_are_not_asked_again():
    rates = DraftRates()
    rates.read([info("a", None, 7)])
    assert not rates.guessing
