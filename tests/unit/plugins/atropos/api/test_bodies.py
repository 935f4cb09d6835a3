from __future__ import annotations

import gzip

import pytest

from lachesis.plugins.atropos.api.bodies import _accepts_gzip, inflate
from lachesis.plugins.atropos.api.wire import Refusal

TEXT = b'{"tokens": [[1, 2, 3]]}' * 50


def refusal(body: bytes, limit: int = 1 << 20) -> Refusal:
    with pytest.raises(Refusal) as refused:
        inflate(body, limit=limit)
    return refused.value


def test_whole_gzip_of_one_or_more_members():
    packed = gzip.compress(TEXT)
    assert inflate(packed, limit=len(TEXT)) == TEXT
    assert inflate(packed + packed + b"\0" * 9, limit=1 << 20) == 2 * TEXT


def test_bombs_are_not_inflated():
    bomb = gzip.compress(b"\0" * (40 << 20))
    assert refusal(bomb).status == 413
    assert refusal(gzip.compress(TEXT), limit=len(TEXT) - 1).status == 413
    assert refusal(gzip.compress(b"") * 100_000).status == 400


@pytest.mark.parametrize("cut", [1, 9, 30])
def test_cut_off(cut: int):
    error = refusal(gzip.compress(TEXT)[:-cut])
    assert error.status == 400 and str(error.detail).startswith("Invalid gzip payload")


def test_no_gzip_and_damage():
    assert refusal(b"plain").detail == "Invalid gzip payload"
    packed = bytearray(gzip.compress(TEXT))
    packed[-6] ^= 1
    assert refusal(bytes(packed)).detail == "Invalid gzip payload"


def test_negotiation():
    assert _accepts_gzip("gzip, deflate") and _accepts_gzip("br;q=1.0, GZIP;q=0.8")
    assert not _accepts_gzip("") and not _accepts_gzip("identity") and not _accepts_gzip("gzip;q=0")
