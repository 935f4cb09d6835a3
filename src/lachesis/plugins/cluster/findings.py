"""Problems with the nodes of a run, found in each node's own facts: pure functions, no network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lachesis.common.types import Finding, Level

# Allowed seconds between clocks: more than networks and schedulers delay an answer.
_CLOCKS_S = 5.0


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts that a process gathers about its node before it asks any other.

    Args:
        engine: True on a node of inference servers; else it is a rank.
        versions: of packages; None if one is not installed.
        gpus: that torch sees.
        free_bytes: on the disk of the run directory.
        unwritable: why the run directory cannot be written; empty if it can.
        taken: ports in use by another process, with its name.
        listening: addresses at which this process listens in place of servers.
    """

    rank: int
    local_rank: int
    node: str
    engine: bool
    versions: Mapping[str, str | None]
    gpus: int
    free_bytes: int
    unwritable: str = ""
    taken: Sequence[str] = ()
    listening: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class NodeOutcome:
    """Findings of a process together with the others.

    Args:
        clock: its time at rank 0's start signal, in seconds since 1970.
        sees_run_dir: True if it sees the file that rank 0 has written there.
        unreachable: addresses of servers that it does not reach.
        failure: why the all-reduce failed; empty if it did not.
        seconds: duration of one all-reduce.
    """

    rank: int
    clock: float
    sees_run_dir: bool
    unreachable: Sequence[str] = ()
    failure: str = ""
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Needs:
    """Requirements of the run for its nodes.

    Args:
        nodes: the node of each process, by rank; also of those that have not come.
        ranks: how many of them train; on GPUs unless ``on_cpu``.
        engine_packages: packages that nodes of servers need.
        needed_bytes: most bytes in the run directory at a time; None if unknown.
        shared: why all nodes have to see the run directory; empty if they need not.
        limit_s: how long processes were waited for.
    """

    nodes: Sequence[str]
    ranks: int
    on_cpu: bool
    engine_packages: Sequence[str]
    needed_bytes: int | None
    shared: str
    limit_s: float


def judge(facts: Sequence[Facts], outcomes: Sequence[NodeOutcome], needs: Needs) -> list[Finding]:
    """Return each problem once, with its node and a remedy."""
    found = [
        *_absent(facts, outcomes, needs),
        *_versions(facts, needs),
        *_gpus(facts, needs),
        *_ports(facts, outcomes, needs),
        *_disk(facts, outcomes, needs),
        *_clocks(outcomes, needs),
        *_collective(outcomes, needs),
    ]
    return list(dict.fromkeys(found))


def _finding(level: Level, rule: str, message: str) -> Finding:
    return Finding(level=level, rule=rule, message=message)


def _absent(facts: Sequence[Facts], outcomes: Sequence[NodeOutcome], needs: Needs) -> Iterator[Finding]:
    came, answered = {one.rank for one in facts}, {one.rank for one in outcomes}
    for rank, node in enumerate(needs.nodes):
        if rank not in came:
            message = f"{node}: process {rank} did not connect within {needs.limit_s:.0f} s"
            yield _finding("problem", "absent", f"{message}: see its log, and check that it can reach rank 0")
        elif rank not in answered:
            message = f"{node}: process {rank} connected, but did not answer after that"
            yield _finding("problem", "absent", f"{message}: see its log")


def _versions(facts: Sequence[Facts], needs: Needs) -> Iterator[Finding]:
    """Compare installed versions with those of rank 0's node, and require the engines' packages on engine nodes."""
    first = facts[0]
    for one in facts:
        for package, version in one.versions.items():
            expected = first.versions.get(package)
            if one.engine and package in needs.engine_packages and version is None:
                message = f"{one.node}: {package} is not installed, but the engine needs it there: install it"
                yield _finding("problem", "versions", message)
            elif version is not None and expected is not None and version != expected:
                message = f"{one.node}: {package} is {version}, but {expected} on {first.node}"
                yield _finding("problem", "versions", f"{message}: install the same on both")


def _gpus(facts: Sequence[Facts], needs: Needs) -> Iterator[Finding]:
    for one in facts:
        if not needs.on_cpu and not one.engine and one.local_rank >= one.gpus:
            message = f"{one.node}: torch sees {one.gpus} GPU(s), but a rank needs number {one.local_rank}"
            yield _finding("problem", "gpus", f"{message}: ask for more GPUs, or check its driver")


def _ports(facts: Sequence[Facts], outcomes: Sequence[NodeOutcome], needs: Needs) -> Iterator[Finding]:
    for one in facts:
        for port in one.taken:
            yield _finding("problem", "ports", f"{one.node}: {port}: stop it, or choose another port")
    for outcome in outcomes:
        for address in outcome.unreachable:
            message = f"{needs.nodes[outcome.rank]}: does not reach {address}, where an engine will be"
            yield _finding("problem", "ports", f"{message}: check the firewall between them")


def _disk(facts: Sequence[Facts], outcomes: Sequence[NodeOutcome], needs: Needs) -> Iterator[Finding]:
    for one in facts:
        if one.unwritable:
            message = f"{one.node}: the run directory cannot be written ({one.unwritable}): choose another run.dir"
            yield _finding("problem", "disk", message)
    first = facts[0]
    if needs.needed_bytes is not None and first.free_bytes < needs.needed_bytes:
        have, need = first.free_bytes / 1e9, needs.needed_bytes / 1e9
        message = f"{first.node}: {have:.1f} GB are free in run.dir, but the run needs {need:.1f} GB"
        yield _finding("problem", "disk", f"{message}: free some space, or lower checkpoint.keep_last")
    for outcome in outcomes:
        if needs.shared and not first.unwritable and not outcome.sees_run_dir:
            message = f"{needs.nodes[outcome.rank]}: does not see files that {first.node} writes to the run directory"
            yield _finding("problem", "disk", f"{message}, and {needs.shared}: put run.dir on a shared disk")


def _clocks(outcomes: Sequence[NodeOutcome], needs: Needs) -> Iterator[Finding]:
    for outcome in outcomes:
        apart = outcome.clock - outcomes[0].clock
        if abs(apart) > _CLOCKS_S:
            words = f"its clock is {abs(apart):.0f} s {'ahead of' if apart > 0 else 'behind'} that of {needs.nodes[0]}"
            message = f"{needs.nodes[outcome.rank]}: {words}: check its time service, or logs cannot be compared"
            yield _finding("warning", "clocks", message)


def _collective(outcomes: Sequence[NodeOutcome], needs: Needs) -> Iterator[Finding]:
    for outcome in outcomes:
        if outcome.failure:
            message = f"{needs.nodes[outcome.rank]}: the all-reduce over {needs.ranks} ranks failed: {outcome.failure}"
            advice = "check that the nodes' network connects them (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)"
            yield _finding("problem", "collective", f"{message}: {advice}")
