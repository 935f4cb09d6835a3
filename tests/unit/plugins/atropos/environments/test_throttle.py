"""How many groups may be in the making."""

from __future__ import annotations

import pytest

from lachesis.plugins.atropos.environments.rollout_api import QueueStatus
from lachesis.plugins.atropos.environments.runner import room_for_groups
from lachesis.plugins.atropos.environments.settings import EnvironmentConfig


def room(*, minimum: float | None = None, most: int = -1, batch_size: int = 64, **status: object) -> int:
    figures = {
        "step": 0, "queue_size": 0, "self_queue_size": 0, "max_group_size": 8, "unallocated_fraction": 1.0,
        "env_weight": 1.0,
    }  # fmt: skip
    config = EnvironmentConfig(
        group_size=8, max_batches_offpolicy=3, min_batch_allocation=minimum, max_num_workers=most
    )
    return room_for_groups(QueueStatus(**figures | status), config, batch_size=batch_size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 24),
        ({"queue_size": 20}, 4),
        ({"queue_size": 30}, 0),
        ({"full": True}, 0),
        # What others have reserved is not this environment's.
        ({"unallocated_fraction": 0.5}, 12),
        ({"unallocated_fraction": 0.0}, 1),
        # With a minimum its own share may be filled, however full the queue is with that of others.
        ({"unallocated_fraction": 0.5, "minimum": 0.5, "queue_size": 100}, 12),
        ({"unallocated_fraction": 0.5, "minimum": 0.5, "queue_size": 100, "self_queue_size": 12}, 0),
        ({"most": 5}, 5),
        ({"most": 8, "env_weight": 0.25}, 2),
        ({"most": 8, "env_weight": 0.01}, 1),
        ({"batch_size": 4}, 1),
    ],
)
def test_room(changes, expected):
    assert room(**changes) == expected
