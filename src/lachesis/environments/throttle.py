"""How many groups an environment may have in the making, so that rollouts do not grow stale. Pure."""

from __future__ import annotations

import math

from lachesis.environments.rollout_api import QueueStatus


def room_for_groups(
    status: QueueStatus,
    *,
    batch_size: int,
    group_size: int,
    max_batches_offpolicy: int,
    minimum: float | None,
    most: int,
) -> int:
    """Groups that may be in the making or on their way to the queue, under the rule of the protocol.

    What is queued and what is being made together are at most ``max_batches_offpolicy`` batches of this
    environment's part: what no one has reserved, and its own ``minimum``. With a minimum it may always fill its own
    share, whatever others have queued. The weight that the API gives it scales ``most``, as it scales requests.

    Args:
        status: the queue, in groups of this environment.
        batch_size: sequences of a batch.
        group_size: sequences of a group.
        max_batches_offpolicy: batches that may be queued ahead of the trainer.
        minimum: the reserved share of every batch, or ``None``.
        most: an upper limit, or -1 for none.
    """
    if status.full:
        return 0
    part = min(1.0, status.unallocated_fraction + (minimum or 0.0))
    # A batch whose part is less than a group still wants one.
    ahead = max(1, int(batch_size * part) * max_batches_offpolicy // group_size)
    room = ahead - status.queue_size
    if minimum:
        share = math.ceil(minimum * batch_size * max_batches_offpolicy / group_size)
        room = max(room, share - status.self_queue_size)
    if most >= 0:
        room = min(room, max(1, round(most * min(1.0, status.env_weight))))
    return max(0, room)
