from __future__ import annotations

import json

import numpy as np
import pytest

from lachesis.common.group_codec import decode_group, encode_group
from lachesis.common.routed_experts import RoutedExperts, joined_routes
from lachesis.common.types import Group, Prompt, Sample, VersionSpan


def routes(*tokens: int, layers: int = 2, k: int = 2) -> RoutedExperts:
    """Of each token numbers that tell it apart."""
    rows = [np.full((layers, k), token) + np.arange(k) for token in tokens]
    return RoutedExperts.of(np.stack(rows))


@pytest.mark.parametrize(("largest", "kind"), [(0, "uint8"), (255, "uint8"), (256, "int16"), (511, "int16")])
def test_numbers_are_as_small_as_they_can_be(largest: int, kind: str):
    chosen = np.full((3, 2, 4), largest, dtype=np.int64)
    found = RoutedExperts.of(chosen)
    assert found.chosen.dtype.name == kind
    assert np.array_equal(found.chosen, chosen)
    assert len(found) == 3


@pytest.mark.parametrize("chosen", [np.zeros((2, 2)), np.zeros((2, 2, 2)), np.full((2, 2, 2), -1)])
def test_what_is_no_routing_is_refused(chosen: np.ndarray):
    with pytest.raises(ValueError, match=r"routed expert"):
        RoutedExperts.of(chosen)


def test_a_group_has_them_again_after_json_unless_it_is_shown():
    sample = Sample((1, 2), (3,), (-0.5,), "stop", VersionSpan(0, 0), routed=routes(7, 300))
    group = Group(Prompt("0", (1, 2), "q"), (sample,))
    (found,) = decode_group(json.loads(json.dumps(encode_group(group)))).samples
    assert found.routed is not None and found.routed.chosen.dtype == np.int16
    assert np.array_equal(found.routed.chosen, routes(7, 300).chosen)
    assert "routed" not in encode_group(group, whole=False)["samples"][0]


def test_turns_are_joined_as_each_token_was_computed_first():
    """The second turn's prompt begins with all of the first, whose last token it computes, and the two told after."""
    first, second = routes(1, 2, 3), routes(11, 12, 13, 14, 15, 16)
    joined = joined_routes([first, second])
    assert joined is not None
    assert joined.chosen[:, 0, 0].tolist() == [1, 2, 3, 14, 15, 16]
    assert joined_routes([first]) is first
    assert joined_routes([first, None]) is None
    assert joined_routes([]) is None
