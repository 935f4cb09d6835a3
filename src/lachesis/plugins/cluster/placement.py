"""Placement of processes on a Ray cluster, and each one's command: pure functions, which know nothing of Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from lachesis.common.errors import ConfigError, LachesisError, error_of
from lachesis.common.hosts import VARIABLE as ALLOWED_HOSTS
from lachesis.common.http import url_host
from lachesis.config.schema import LachesisConfig
from lachesis.plugins.atropos.section import AtroposSourceConfig, ServicesConfig
from lachesis.plugins.cluster.layout import FINAL, Layout, Machines, of_ranks

# As the modules that read them have them; neither is imported here, for both import torch.
NODE_VARIABLE, JOB_TOKEN, SESSION_TOKEN = "LACHESIS_NODE", "LACHESIS_JOB_TOKEN", "LACHESIS_SESSION_TOKEN"
Bundle = Mapping[str, float]
# A rank that is asked to end first writes a checkpoint, by which time others would be in its place.
_RANK_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """Resources of a node for runs."""

    address: str
    cpus: int
    gpus: int


@dataclass(frozen=True, slots=True)
class Place:
    """Location of a host: ``node`` is Ray's name of it, and ``free_port`` is unused there."""

    node: str
    address: str
    free_port: int


@dataclass(frozen=True, slots=True)
class Task:
    """A process: ``words`` after `python -m lachesis`, added variables, and the file that gets its output.

    ``grace_s`` is how long it may take to end by itself when it is to be stopped.
    """

    name: str
    words: tuple[str, ...]
    log: Path
    environment: Mapping[str, str]
    grace_s: float = 20.0


@dataclass(frozen=True, slots=True)
class Ended:
    """End of a process: its exit code, negative for a signal, and its last output."""

    code: int | None
    said: str


@dataclass(frozen=True, slots=True)
class Lost:
    """A host is gone, with what ran there; ``node_lost`` tells whether its node is."""

    reason: str
    node_lost: bool


@dataclass(frozen=True, slots=True)
class RayJob:
    """Job to place.

    Args:
        config: of the run, as read.
        layout: ranks and servers.
        directory: for logs, addresses and configurations, beside the run directory; on a disk that all nodes share.
        environment: of all processes: the job's secrets, and the variables that the configuration passes on.
    """

    config: LachesisConfig
    layout: Layout
    directory: Path
    environment: Mapping[str, str]

    @property
    def apart(self) -> bool:
        """True if rollout API and environment have their own hosts; else rank 0 starts them beside itself."""
        return self.layout.command == "run" and self.layout.servers is not None

    @property
    def run_dir(self) -> Path:
        """Directory of the run."""
        return self.config.run.directory

    @property
    def engines_file(self) -> Path:
        """File of the servers' addresses, which the trainer reads again before each transfer."""
        return self.directory / "engines"

    @property
    def ranks_config(self) -> Path:
        """Configuration file of ranks."""
        return self.directory / "ranks.yaml"

    @property
    def engine_config(self) -> Path:
        """Configuration file of engines and the preflight."""
        return self.directory / "engine.yaml"


def takes_ray(config: LachesisConfig, environment: Mapping[str, str]) -> bool:
    """Return True if `lachesis run` places the run on a Ray cluster."""
    kind = config.cluster.kind
    return kind == "ray" or (kind == "auto" and bool(environment.get("RAY_ADDRESS")))


def passed_on(config: LachesisConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``cluster.environment``. Raises ConfigError if one is not set."""
    missing = [name for name in config.cluster.environment if name not in environment]
    if missing:
        raise ConfigError(
            f"cluster.environment names {', '.join(missing)}, and no such variable is set here",
            remedy="set it, or leave it out",
        )
    return {name: environment[name] for name in config.cluster.environment}


def machines_of(nodes: Sequence[NodeRoom], config: LachesisConfig) -> Machines:
    """Return the machines that the run takes from the existing nodes.

    Raises:
        ConfigError: no node has enough, or they differ and the configuration does not say what to take.
    """
    wanted, on_cpu = config.cluster, config.model.device == "cpu"
    usable = [node for node in nodes if (node.cpus if on_cpu else node.gpus)]
    if not usable:
        raise ConfigError(
            f"none of the {len(nodes)} node(s) of the Ray cluster has a {'CPU' if on_cpu else 'GPU'}",
            remedy="start nodes that have, or set model.device: cpu" if not on_cpu else "start nodes with --num-cpus",
        )
    count = wanted.nodes or len(usable)
    if on_cpu:
        if wanted.gpus_per_node is not None:
            raise ConfigError("cluster.gpus_per_node is set, and model.device is cpu", remedy="leave one of them out")
        return Machines(nodes=count, ranks=wanted.ranks_per_node)
    sizes = sorted({node.gpus for node in usable})
    if wanted.gpus_per_node is None and len(sizes) > 1:
        named = ", ".join(f"{node.address} {node.gpus}" for node in usable)
        raise ConfigError(
            f"the nodes of the Ray cluster have different numbers of GPUs: {named}",
            remedy="say with cluster.gpus_per_node and cluster.nodes what the run is to take",
        )
    return Machines(nodes=count, gpus=wanted.gpus_per_node or sizes[0], ranks=wanted.ranks_per_node)


def rank_bundles(layout: Layout) -> list[Bundle]:
    """Return a bundle for each node of ranks, to be on different nodes."""
    return [_bundle(cpus=layout.ranks_per_node, gpus=layout.gpus)] * layout.rank_nodes


def engine_bundle(layout: Layout) -> Bundle:
    """Return the bundle of one inference server."""
    assert layout.servers is not None, "there are engines on separate nodes"
    return _bundle(cpus=1, gpus=layout.servers.gpus)


def spread(number: int, hosts: Sequence[str], nodes: Sequence[str]) -> str | None:
    """Return the best node for the engine of this number, with the fewest hosts of the job; None without nodes.

    Ray may choose another node if this one is full.
    """
    if not nodes:
        return None
    shifted = [*nodes[number % len(nodes) :], *nodes[: number % len(nodes)]]
    return min(shifted, key=hosts.count)


def config_of_ranks(job: RayJob, *, api: str | None) -> LachesisConfig:
    """Return the ranks' configuration: engines by address, the rollout API if it was started, and nothing to start."""
    config = job.config
    if job.layout.servers is not None:
        config = of_ranks(config, [f"file:{job.engines_file}"])
    changes: dict[str, object] = {"cluster": config.cluster.model_copy(update={"kind": "local"})}
    if job.apart:
        changes["services"] = ServicesConfig(api=None, environment=None, restarts=config.services.restarts)
    if api is not None:
        assert isinstance(config.source, AtroposSourceConfig), "the layout has found so"
        changes["source"] = config.source.model_copy(update={"url": api})
    return config.model_copy(update=changes)


def rank_tasks(job: RayJob, places: Sequence[Place], *, options: Sequence[str]) -> list[list[Task]]:
    """Return the ranks of each of the nodes ``places``, with the environment that torchrun would set."""
    command = "train" if job.apart else job.layout.command
    words = (command, str(job.ranks_config), *options)
    return [
        [
            Task(f"rank {rank}", words, job.directory / f"rank-{rank}.log", environment, grace_s=_RANK_GRACE_S)
            for rank, environment in _ranks_of(job, places, node=node, size=job.layout.ranks)
        ]
        for node in range(len(places))
    ]


def preflight_tasks(job: RayJob, ranks: Sequence[Place], engines: Sequence[Place], *, within_s: float) -> list[Task]:
    """Return the tasks of a preflight: one for each rank, then one for each engine."""
    size = job.layout.ranks + len(engines)
    per_node = job.layout.ranks_per_node
    names = [place.address for place in ranks for _ in range(per_node)] + [place.address for place in engines]
    limits = ("--ranks", str(job.layout.ranks), "--within", f"{within_s:g}")
    words = ("cluster", "preflight", str(job.engine_config), *limits, "--node-names", ",".join(names))
    tasks = [
        Task(f"the preflight of rank {rank}", words, job.directory / f"preflight-{rank}.log", environment)
        for node in range(len(ranks))
        for rank, environment in _ranks_of(job, ranks, node=node, size=size)
    ]
    for number, place in enumerate(engines):
        assert job.layout.servers is not None, "there are engines"
        rank = job.layout.ranks + number
        port = job.layout.servers.port + number
        own = _rank_environment(job, ranks, place, rank=rank, size=size, local=0, local_size=1)
        more = ("--servers", "1", "--set", f"engine.port={port}")
        log = job.directory / f"preflight-{rank}.log"
        tasks.append(Task(f"the preflight of engine {number}", (*words, *more), log, own))
    return tasks


def engine_task(job: RayJob, place: Place, *, number: int) -> Task:
    """Return the task of the inference server of this number on its node."""
    assert job.layout.servers is not None, "there are engines"
    words = ("vllm-serve", str(job.engine_config), "--port", str(job.layout.servers.port + number))
    own = {ALLOWED_HOSTS: place.address}
    log = job.directory / f"engine-{number}.log"
    return Task(f"engine {number} at {place.address}", words, log, {**job.environment, **own})


def engine_url(job: RayJob, place: Place, *, number: int) -> str:
    """Return an engine's address; ports are counted over all nodes, so that several engines may share one."""
    assert job.layout.servers is not None, "there are engines"
    return f"http://{url_host(place.address)}:{job.layout.servers.port + number}"


def api_url_at(job: RayJob, place: Place) -> str:
    """Return the rollout API's address on a node: the port is that of ``source.url``."""
    assert isinstance(job.config.source, AtroposSourceConfig), "the layout has found so"
    return f"http://{url_host(place.address)}:{urlsplit(job.config.source.url).port or 80}"


def service_task(job: RayJob, command: Sequence[str], place: Place, *, name: str, log: str) -> Task:
    """Return the task of rollout API or environment; ``command`` is `PYTHON -m lachesis WORDS` of another node."""
    words = tuple(command[command.index("lachesis") + 1 :])
    own = {ALLOWED_HOSTS: place.address}
    return Task(f"{name} at {place.address}", words, job.directory / log, {**job.environment, **own})


def start_options(first: Sequence[str], *, begun: bool, has_checkpoint: bool) -> tuple[str, ...]:
    """Return options of ranks: the user's until this job's run has begun, then those to resume or to start over."""
    if not begun:
        return tuple(first)
    return ("--resume",) if has_checkpoint else ("--overwrite",)


def cause(ends: Mapping[int, Ended | Lost]) -> tuple[int, Ended | Lost]:
    """Return the rank whose end explains why the ranks failed: rank 0 if it reported an error, or was not left behind.

    A lost node or a signal explains nothing: any rank that reports an error explains more.
    """
    failed = {rank: end for rank, end in ends.items() if not (isinstance(end, Ended) and end.code == 0)}
    spoken = {rank: end for rank, end in failed.items() if isinstance(end, Ended) and (end.code or 0) > 0}
    final = [rank for rank, end in spoken.items() if end.code in FINAL]
    rank = min(final or failed.keys() - spoken or spoken or ends)
    return rank, ends[rank]


def is_final(end: Ended | Lost) -> bool:
    """Return True if the same failure would follow any restart."""
    return isinstance(end, Ended) and end.code in FINAL


def failure(name: str, end: Ended | Lost) -> LachesisError:
    """Return the end of a process as an error, with its own message and exit code if it had any."""
    if isinstance(end, Lost):
        return error_of(None, f"{name} is lost: {end.reason}")
    if end.code is not None and end.code > 0 and end.said.startswith("error: "):
        return error_of(end.code, f"{name}: {end.said.removeprefix('error: ')}")
    ending = (
        "ended"
        if end.code is None
        else f"was ended by signal {-end.code}"
        if end.code < 0
        else f"ended with exit code {end.code}"
    )
    return error_of(end.code, f"{name} {ending}; its last words: {end.said or '(none)'}")


def _bundle(*, cpus: int, gpus: int) -> Bundle:
    return {"CPU": float(cpus)} | ({"GPU": float(gpus)} if gpus else {})


def _ranks_of(job: RayJob, places: Sequence[Place], *, node: int, size: int) -> list[tuple[int, dict[str, str]]]:
    per_node = job.layout.ranks_per_node
    return [
        (
            node * per_node + local,
            _rank_environment(
                job, places, places[node], rank=node * per_node + local, size=size, local=local, local_size=per_node
            ),
        )
        for local in range(per_node)
    ]


def _rank_environment(
    job: RayJob, places: Sequence[Place], own: Place, *, rank: int, size: int, local: int, local_size: int
) -> dict[str, str]:
    torchrun = {
        "MASTER_ADDR": places[0].address,
        "MASTER_PORT": places[0].free_port,
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": local_size,
    }
    return {**job.environment, NODE_VARIABLE: own.address, **{name: str(value) for name, value in torchrun.items()}}
