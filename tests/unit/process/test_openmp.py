"""How OpenMP's threads wait."""

from __future__ import annotations

import pytest

from lachesis.process.openmp import brief_waits


@pytest.mark.parametrize(
    ("there", "added"),
    [
        ({}, {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "5000"}),
        ({"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, {}),
        ({"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "7"}, {}),
    ],
)
def test_what_the_environment_says_is_left_as_it_is(there: dict[str, str], added: dict[str, str]):
    assert brief_waits(there) == added
