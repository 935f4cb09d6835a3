from __future__ import annotations

import pytest

from lachesis.pipeline.filters import failed_entirely, fresh, has_signal
from tests.unit.pipeline.sources import group


@pytest.mark.parametrize(
    ("rewards", "signal", "failed"),
    [
        ((0.0, 1.0), True, False),
        ((1.0, 1.0), False, False),
        ((0.0, 0.0), False, True),
        ((0.0, None, 0.0), False, True),
        ((1.0, None), False, False),
        ((None, None), False, False),
        ((None, 0.5, 0.25), True, False),
        ((), False, False),
        ((1e-9, -1e-9), True, True),
    ],
)
def test_what_teaches_and_what_failed(rewards, signal, failed):
    assert (has_signal(group("a", rewards)), failed_entirely(group("a", rewards))) == (signal, failed)


def test_staleness_counts_from_the_oldest_token():
    groups = [group(str(version), (0.0, 1.0), version=version) for version in (1, 2, 3)]
    assert [g.prompt.id for g in fresh(groups, version=4, max_staleness=2)] == ["2", "3"]
    assert fresh(groups, version=4, max_staleness=None) == groups
    assert fresh(groups, version=4, max_staleness=0) == []
