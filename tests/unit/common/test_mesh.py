"""The mesh of ranks: what the sizes that a configuration asks for make of so many."""

from __future__ import annotations

from typing import Any

import pytest

from lachesis.common.errors import ConfigError
from lachesis.common.mesh import Mesh, derive_mesh
from lachesis.config.schema import DistributedConfig


@pytest.mark.parametrize(
    ("sizes", "ranks", "expected"),
    [
        ({}, 8, Mesh(shard=8)),
        ({"shard_size": 4}, 8, Mesh(replicate=2, shard=4)),
        ({"replicate_size": 4}, 8, Mesh(replicate=4, shard=2)),
        ({"replicate_size": 4, "shard_size": 2}, 8, Mesh(replicate=4, shard=2)),
        ({"replicate_size": 1}, 8, Mesh(shard=8)),
        ({"shard_size": 1}, 2, Mesh(replicate=2)),
        ({"strategy": "replicate"}, 4, Mesh(replicate=4)),
        ({"strategy": "replicate", "replicate_size": 4, "shard_size": 1}, 4, Mesh(replicate=4)),
        ({"shard_size": 8, "replicate_size": 3}, 1, Mesh()),
    ],
)
def test_what_is_left_out_is_what_the_others_leave(sizes: dict[str, Any], ranks: int, expected: Mesh):
    found = derive_mesh(DistributedConfig(**sizes), ranks=ranks)
    assert found == expected
    assert found.ranks == ranks
    assert found.cut == expected.shard


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"shard_size": 3}, "shard_size is 3 and there are 4 devices: they make no whole groups"),
        ({"replicate_size": 3}, "replicate_size is 3 and there are 4 devices: they make no whole groups"),
        ({"replicate_size": 2, "shard_size": 4}, "replicate_size 2 and groups of 4 are 8 devices, and there are 4"),
        ({"replicate_size": 2, "shard_size": 1}, "replicate_size 2 and groups of 1 are 2 devices, and there are 4"),
        ({"strategy": "replicate", "shard_size": 2}, "with distributed.strategy replicate nothing is cut"),
        ({"strategy": "replicate", "replicate_size": 2}, "groups of 1 are 2 devices, and there are 4"),
    ],
)
def test_what_does_not_divide_or_go_together_is_refused(sizes: dict[str, Any], expected: str):
    with pytest.raises(ConfigError, match=expected) as caught:
        derive_mesh(DistributedConfig(**sizes), ranks=4)
    assert caught.value.remedy


def test_two_dimensions_have_words():
    assert Mesh(replicate=2, shard=4).words == "2 replicas of 4 shards"
    assert not Mesh(replicate=4).words
    assert not Mesh(shard=4).words
