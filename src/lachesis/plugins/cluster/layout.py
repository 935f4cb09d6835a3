"""Division of nodes into training and generating ones, from a configuration and the available machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lachesis.common.errors import CheckpointError, ConfigError, DataError, DependencyError, ModelError, RewardError
from lachesis.common.hosts import is_this_machine
from lachesis.config.rules.distributed import require_colocatable, require_distributable
from lachesis.config.schema import (
    SERVERS_FILE,
    EmbeddedServerConfig,
    HttpEngineConfig,
    LachesisConfig,
    VllmEngineConfig,
)
from lachesis.plugins.atropos.section import AtroposSourceConfig

# Exit codes of failures that would come again, after which nothing is restarted.
FINAL = sorted(
    kind.exit_code for kind in (ConfigError, DataError, RewardError, ModelError, CheckpointError, DependencyError)
)


@dataclass(frozen=True, slots=True)
class Machines:
    """Request to a scheduler: ``nodes`` with ``gpus`` each.

    ``ranks`` is for runs on the CPU only: ranks of a node. On GPUs each GPU that trains has one rank.
    """

    nodes: int = 1
    gpus: int = 0
    ranks: int | None = None


@dataclass(frozen=True, slots=True)
class NodeServers:
    """Inference servers on separate nodes: ``count`` of them over ``nodes``, ``per_node`` on all but the last.

    Each has ``gpus`` GPUs; ports of a node are counted from ``port``.
    """

    count: int
    nodes: int
    per_node: int
    gpus: int
    port: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks on the first ``rank_nodes`` nodes, equally many on each, and ``servers`` on the nodes after them.

    ``command`` is the command of a rank: `lachesis run` also starts the rollout API and the environment next to rank 0.
    """

    command: Literal["train", "run"]
    rank_nodes: int
    ranks_per_node: int
    gpus: int
    servers: NodeServers | None

    @property
    def ranks(self) -> int:
        """Number of all ranks."""
        return self.rank_nodes * self.ranks_per_node

    @property
    def nodes(self) -> int:
        """Number of all nodes."""
        return self.rank_nodes + (self.servers.nodes if self.servers else 0)

    @property
    def summary(self) -> str:
        """Summary of the layout in one line."""
        words = f"{self.ranks} rank(s) on {self.rank_nodes} node(s)"
        if self.servers is not None:
            words += f", {self.servers.count} inference server(s) on {self.servers.nodes} more"
        return words


def derive_layout(config: LachesisConfig, machines: Machines) -> Layout:
    """Derive the role of each node.

    On one node the run starts its engine itself, as it does without a scheduler. On several the servers of
    ``engine.kind`` vllm or embedded_server get separate nodes; with any other kind all nodes train.

    Raises:
        ConfigError: configuration and machines do not fit together.
    """
    _check_devices(config, machines)
    servers = None if machines.nodes == 1 else _servers(config, machines)
    rank_nodes = machines.nodes - (servers.nodes if servers else 0)
    if servers is not None and rank_nodes < 1:
        raise ConfigError(
            f"{servers.count} engine(s) with {servers.gpus} GPU(s) each take {servers.nodes} node(s) of "
            f"{machines.gpus} GPU(s), so that none of {machines.nodes} is left to train",
            remedy="ask for more --nodes, or lower engine.data_parallel_size",
        )
    per_node = _ranks_of_node(config, machines) if machines.gpus else machines.ranks or 1
    layout = Layout(_command(config), rank_nodes, per_node, machines.gpus, servers)
    _check_addresses(config, layout)
    if layout.ranks > 1:
        require_distributable(config, ranks=layout.ranks)
        if servers is None:
            require_colocatable(config, ranks=layout.ranks, here=per_node)
    return layout


def engine_ports(config: LachesisConfig, *, servers: int) -> list[int]:
    """Return the ports of the servers of a node. Raises ConfigError if the configuration has no engine to serve."""
    engine = config.engine
    if isinstance(engine, VllmEngineConfig | EmbeddedServerConfig):
        return [engine.port + number for number in range(servers)]
    if servers:
        raise ConfigError(
            f"--servers is {servers}, but a job does not start servers of engine.kind {engine.kind}",
            remedy="leave --servers out, or set engine.kind: vllm",
        )
    return []


def _check_devices(config: LachesisConfig, machines: Machines) -> None:
    on_cpu = config.model.device == "cpu"
    if on_cpu and machines.gpus:
        raise ConfigError(
            f"model.device is cpu, but --gpus-per-node asks for {machines.gpus} GPU(s)",
            remedy="leave --gpus-per-node out, or model.device",
        )
    if not on_cpu and not machines.gpus:
        raise ConfigError(
            f"model.device is {config.model.device}, but the number of GPUs of a node is not given",
            remedy="give --gpus-per-node, or set model.device: cpu",
        )
    if not on_cpu and machines.ranks is not None:
        raise ConfigError(
            "--ranks-per-node is for model.device cpu: each GPU that trains has one rank",
            remedy="leave it out; engine.devices says which GPUs of a single node generate",
        )


def _servers(config: LachesisConfig, machines: Machines) -> NodeServers | None:
    """Return the servers on separate nodes of a job of several nodes."""
    engine = config.engine
    if not isinstance(engine, VllmEngineConfig | EmbeddedServerConfig):
        return None
    if key := _one_machine(config):
        raise ConfigError(
            f"{key} needs engine and trainer on one machine, but there are {machines.nodes} nodes",
            remedy="use --nodes 1, or set bridge.kind: broadcast (lora_nccl or lora_only with an adapter)",
        )
    copies, size = 1, 1 if machines.gpus else 0
    if isinstance(engine, VllmEngineConfig):
        if engine.devices is not None:
            raise ConfigError(
                f"engine.devices {engine.devices} names GPUs of one machine, but with {machines.nodes} nodes engines "
                "have separate nodes",
                remedy="leave engine.devices out, or use --nodes 1",
            )
        copies, size = engine.data_parallel_size, engine.tensor_parallel_size if machines.gpus else 0
    if size > machines.gpus:
        raise ConfigError(
            f"engine.tensor_parallel_size {size} is more than the {machines.gpus} GPU(s) of a node",
            remedy="lower it, or ask for nodes with more GPUs: an engine needs one node",
        )
    per_node = min(copies, machines.gpus // size if size else copies)
    return NodeServers(count=copies, nodes=-(-copies // per_node), per_node=per_node, gpus=size, port=engine.port)


def _ranks_of_node(config: LachesisConfig, machines: Machines) -> int:
    """Return how many GPUs of a node train: all but those of engines beside them."""
    engine, gpus = config.engine, machines.gpus
    if machines.nodes > 1 or not isinstance(engine, VllmEngineConfig):
        return gpus
    if key := _one_copy(config):
        if gpus > 1:
            raise ConfigError(
                f"{key} needs engine and trainer on one GPU, but a node of {gpus} was requested",
                remedy="use --gpus-per-node 1, or another bridge and engine.devices",
            )
        return 1
    if engine.devices is None or engine.enable_sleep_mode:
        return gpus
    taken = [device.strip() for device in engine.devices.split(",")]
    ranks = gpus - len(taken)
    if ranks < 1 or any(not device.isdecimal() or not ranks <= int(device) < gpus for device in taken):
        raise ConfigError(
            f"engine.devices {engine.devices} and the {max(ranks, 0)} rank(s) on the other GPUs of a node of {gpus}: "
            "ranks take those from 0 on",
            remedy="name the node's last GPUs by number, and leave at least one to train",
        )
    return ranks


def _one_copy(config: LachesisConfig) -> str:
    """Return the key, for messages, that makes trainer and engine share a GPU's memory; empty if none does."""
    bridge = config.bridge
    if bridge.capabilities.shares_storage and config.engine.place != "trainer":
        return f"bridge.kind {bridge.kind}"
    return "bridge.share_base" if getattr(bridge, "share_base", False) else ""


def _one_machine(config: LachesisConfig) -> str:
    """Return the key, for messages, that makes the trainer start the engine on its machine; empty if none does."""
    if config.bridge.capabilities.owns_engine:
        return f"bridge.kind {config.bridge.kind}"
    sleeps = isinstance(config.engine, VllmEngineConfig) and config.engine.enable_sleep_mode
    return _one_copy(config) or ("engine.enable_sleep_mode" if sleeps else "")


def _command(config: LachesisConfig) -> Literal["train", "run"]:
    services = config.services
    starts = services.api is not None or services.environment is not None
    return "run" if isinstance(config.source, AtroposSourceConfig) and starts else "train"


def _check_addresses(config: LachesisConfig, layout: Layout) -> None:
    """Check that services of the job can be reached, and that others are not expected on a node of the job."""
    if layout.command == "run":
        from lachesis.plugins.atropos.services import check_service_keys  # imports environments, which few jobs need

        check_service_keys(config)
    elif isinstance(config.source, AtroposSourceConfig) and is_this_machine(config.source.url):
        raise ConfigError(
            f"source.url {config.source.url} is the node of rank 0, where this job starts no rollout API",
            remedy="leave services.api out, so that the job starts one, or give the API's address",
        )
    if not isinstance(config.engine, HttpEngineConfig):
        return
    local = [url for url in config.engine.urls if not url.startswith(SERVERS_FILE) and is_this_machine(url)]
    if local:
        raise ConfigError(
            f"engine.urls {local[0]} is the node of rank 0, where this job starts no server",
            remedy="set engine.kind: vllm, so that the job starts it, or give the server's address",
        )
