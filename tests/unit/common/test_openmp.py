"""How OpenMP's threads wait."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lachesis.common.openmp import brief_waits
from tests.waiting import LONG_S


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


def test_it_is_said_before_torch_is_loaded():
    program = (
        "import os, sys, lachesis\nassert 'torch' not in sys.modules and 'GOMP_SPINCOUNT' not in os.environ\n"
        "lachesis.Policy\nassert 'torch' in sys.modules\nprint(os.environ['GOMP_SPINCOUNT'])\n"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    words = [sys.executable, "-c", program]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=LONG_S, check=True)
    assert ended.stdout == "5000\n"
