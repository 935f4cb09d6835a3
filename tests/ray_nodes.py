"""A Ray cluster of this machine alone: nodes with processes and addresses of their own, which can be lost."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

from tests.e2e.runs import environment

# Bytes: nothing of ours goes through Ray's store, and this is nearly the least that it takes.
_STORE = 80 << 20
# Ray reads it once in a process.
_TOKEN = secrets.token_hex(32)


@contextmanager
def ray_cluster(cpus: Sequence[int]) -> Iterator[Any]:
    """Within it nodes with so many CPUs, the first of them the head; RAY_ADDRESS and what else it takes is set.

    The others are at 127.0.0.2 and so on. `ray.cluster_utils.Cluster` has ``add_node`` and ``remove_node``.
    """
    own = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": _TOKEN,
        "RAY_enable_worker_prestart": "0",
        # That a node is gone is known after three looks, one a second, in place of five, one each three seconds.
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_failure_threshold": "3",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with patch.dict(os.environ, environment(**own)):
        cluster = import_module("ray.cluster_utils").Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": cpus[0], "object_store_memory": _STORE, "include_dashboard": False},
        )
        try:
            for number, of_node in enumerate(cpus[1:], 2):
                add_node(cluster, number, cpus=of_node)
            cluster.wait_for_nodes()
            os.environ["RAY_ADDRESS"] = cluster.address
            yield cluster
        finally:
            cluster.shutdown()


def add_node(cluster: Any, number: int, *, cpus: int) -> Any:
    """One more node, at 127.0.0.NUMBER."""
    return cluster.add_node(num_cpus=cpus, object_store_memory=_STORE, node_ip_address=f"127.0.0.{number}", wait=False)


def lose_node(cluster: Any, address: str) -> None:
    """Have the node at an address killed, with what Ray runs there."""
    (node,) = (node for node in cluster.worker_nodes if node.node_ip_address == address)
    cluster.remove_node(node, allow_graceful=False)
