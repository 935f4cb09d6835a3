"""The mesh of ranks: what the sizes that a configuration asks for make of so many."""

from __future__ import annotations

from typing import Any

import pytest

from lachesis.common.errors import ConfigError
from lachesis.config.schema import DistributedConfig
from lachesis.config.schema.mesh import Mesh, derive_mesh, require_experts, require_heads


@pytest.mark.parametrize(
    ("sizes", "ranks", "expected"),
    [
        ({}, 8, Mesh(shard=8)),
        ({"shard_size": 4}, 8, Mesh(replicate=2, shard=4)),
        ({"replicate_size": 4}, 8, Mesh(replicate=4, shard=2)),
        ({"replicate_size": 4, "shard_size": 2}, 8, Mesh(replicate=4, shard=2)),
        ({"replicate_size": 1}, 8, Mesh(shard=8)),
        ({"shard_size": 1}, 2, Mesh(replicate=2)),
        ({"strategy": "replicate"}, 4, Mesh(replicate=4, whole=True)),
        ({"strategy": "replicate", "replicate_size": 4, "shard_size": 1}, 4, Mesh(replicate=4, whole=True)),
        ({"context_parallel_size": 2}, 8, Mesh(shard=4, context=2)),
        ({"context_parallel_size": 4, "replicate_size": 2}, 8, Mesh(replicate=2, context=4)),
        ({"context_parallel_size": 2, "shard_size": 2}, 8, Mesh(replicate=2, shard=2, context=2)),
        ({"context_parallel_size": 2, "strategy": "replicate"}, 8, Mesh(replicate=4, context=2, whole=True)),
        ({"expert_parallel_size": 4}, 8, Mesh(shard=8, expert=4)),
        ({"expert_parallel_size": 4, "context_parallel_size": 2, "shard_size": 2}, 8, Mesh(2, 2, 2, expert=4)),
        ({"shard_size": 8, "replicate_size": 3}, 1, Mesh()),
    ],
)
def test_what_is_left_out_is_what_the_others_leave(sizes: dict[str, Any], ranks: int, expected: Mesh):
    found = derive_mesh(DistributedConfig(**sizes), ranks=ranks)
    assert found == expected
    assert found.ranks == ranks
    assert found.cut == (1 if found.whole else ranks // found.replicate)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"shard_size": 3}, "shard_size is 3, but there are 4 devices, which is not a multiple"),
        ({"replicate_size": 3}, "replicate_size is 3, but there are 4 devices, which is not a multiple"),
        ({"replicate_size": 2, "shard_size": 4}, "replicate_size is 2, for groups of 4, but there are 4 devices"),
        ({"replicate_size": 2, "shard_size": 1}, "replicate_size is 2, for groups of 1, but there are 4 devices"),
        ({"strategy": "replicate", "shard_size": 2}, "strategy replicate shards nothing"),
        ({"strategy": "replicate", "replicate_size": 2}, "for groups of 1, but there are 4 devices"),
        ({"context_parallel_size": 3}, "context_parallel_size is 3 but 4 device\\(s\\) train, which is not a multiple"),
        (
            {"context_parallel_size": 2, "shard_size": 4},
            "shard_size is 4, but there are 2 groups of 2 that share a micro-batch",
        ),
        (
            {"expert_parallel_size": 3},
            "expert_parallel_size is 3, which does not divide the 4 devices that share one copy",
        ),
        (
            {"expert_parallel_size": 4, "shard_size": 2},
            "expert_parallel_size is 4, which does not divide the 2 devices",
        ),
        ({"expert_parallel_size": 2, "strategy": "replicate"}, "expert_parallel_size is 2, but .* shards nothing"),
    ],
)
def test_what_does_not_divide_or_go_together_is_refused(sizes: dict[str, Any], expected: str):
    with pytest.raises(ConfigError, match=expected) as caught:
        derive_mesh(DistributedConfig(**sizes), ranks=4)
    assert caught.value.remedy


def test_one_process_cannot_share_its_sequences():
    with pytest.raises(ConfigError, match="context_parallel_size is 2 but 1 device") as caught:
        derive_mesh(DistributedConfig(context_parallel_size=2), ranks=1)
    assert "torchrun" in caught.value.remedy
    assert "--devices 2" in caught.value.remedy


@pytest.mark.parametrize(("context", "heads", "kv_heads"), [(2, 4, 2), (4, 4, 2), (8, 16, 1), (1, 3, 3), (3, 6, 3)])
def test_heads_are_dealt_out_and_those_of_keys_repeated(context: int, heads: int, kv_heads: int):
    require_heads(context, heads=heads, kv_heads=kv_heads)


@pytest.mark.parametrize(("context", "heads", "kv_heads"), [(3, 4, 2), (4, 12, 6), (8, 4, 4), (6, 12, 4)])
def test_heads_that_make_no_whole_number_are_refused(context: int, heads: int, kv_heads: int):
    with pytest.raises(ConfigError, match=f"{heads} attention heads and {kv_heads} key-value heads") as caught:
        require_heads(context, heads=heads, kv_heads=kv_heads)
    assert "divisor of" in caught.value.remedy


def test_one_process_has_its_experts_to_itself():
    with pytest.raises(ConfigError, match="expert_parallel_size is 2, which does not divide the 1 devices"):
        derive_mesh(DistributedConfig(expert_parallel_size=2), ranks=1)


def test_experts_are_shared_out_evenly():
    require_experts(4, experts=8)
    require_experts(1, experts=1)
    for ranks, experts, expected in (
        (3, 8, "expert_parallel_size is 3, but the model has 8 experts in a layer"),
        (2, 1, "the model is not a mixture of experts"),
    ):
        with pytest.raises(ConfigError, match=expected) as caught:
            require_experts(ranks, experts=experts)
        assert caught.value.remedy


@pytest.mark.parametrize("mesh", [Mesh(replicate=2, context=2), Mesh(shard=2, context=2)])
def test_ranks_that_compute_together_have_one_part(mesh: Mesh):
    assert mesh.of_ranks("ab") == ["a", "a", "b", "b"]
    assert mesh.of_parts([1, 2, 3, 4]) == [1, 3]


def test_two_dimensions_have_words():
    assert Mesh(replicate=2, shard=4).words == "replicate 2 x shard 4"
    assert Mesh(context=2).words == "context 2"
    assert Mesh(shard=4, context=2).words == "shard 4 x context 2"
    assert Mesh(shard=8, expert=4).words == "shard 8, experts over 4"
    assert not Mesh(replicate=4).words
    assert not Mesh(shard=4).words
