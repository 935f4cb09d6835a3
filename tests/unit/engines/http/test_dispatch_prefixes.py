"""Hits in the prefix caches of engines."""

from __future__ import annotations

from lachesis.engines.http.dispatch import PrefixHits
from lachesis.metrics.values import Mean


def test_hits_are_counted_for_each_engine_since_they_were_last_taken():
    hits = PrefixHits()
    hits.add("a", [0, 16, 16], prompt_tokens=20)
    hits.add("a", [16], prompt_tokens=30)
    hits.add("b", [8], prompt_tokens=10)
    assert hits.take() == {"a": Mean(48, 90), "b": Mean(8, 10)}
    hits.add("b", [0], prompt_tokens=10)
    assert hits.take() == {"b": Mean(0, 10)}


def test_what_nobody_knows_is_not_counted():
    hits = PrefixHits()
    hits.add("a", [None, None], prompt_tokens=20)
    assert hits.take() == {}
    hits.add("a", [None, 16], prompt_tokens=20)
    assert hits.take() == {"a": Mean(16, 20)}
