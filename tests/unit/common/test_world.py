"""What torchrun says in the environment."""

from __future__ import annotations

import pytest

from lachesis.common.errors import ConfigError
from lachesis.common.world import World, find_world

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "1", "RANK": "0"}, {"WORLD_SIZE": ""}, {"RANK": "3"}])
def test_one_process_is_no_world(environment: dict[str, str]):
    assert find_world(environment) is None


def test_a_rank_of_several_nodes():
    world = find_world(TORCHRUN)
    assert world == World(rank=5, size=8, local_rank=1, local_size=4)


def test_how_often_torchrun_has_started_again_is_known():
    world = find_world(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"})
    assert world is not None
    assert world.restarts == 2


def test_without_a_local_rank_there_is_one_node():
    world = find_world({"RANK": "1", "WORLD_SIZE": "2"})
    assert world == World(rank=1, size=2, local_rank=1, local_size=2)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"WORLD_SIZE": "2"}, "torchrun's variables are wrong: 'RANK'"),
        ({"WORLD_SIZE": "2", "RANK": "x"}, "torchrun's variables are wrong"),
        ({"WORLD_SIZE": "many"}, "'many', which is not a number of processes"),
        (TORCHRUN | {"RANK": "8"}, "rank 8 of 8"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "local rank 4 of 4"),
    ],
)
def test_what_does_not_belong_together_is_an_error(environment: dict[str, str], expected: str):
    with pytest.raises(ConfigError, match=expected) as caught:
        find_world(environment)
    assert "torchrun --nproc-per-node" in caught.value.remedy
