"""What it costs that rank 0 leads: turns a step, and milliseconds a turn, beside the broadcast of a decision.

    PYTHONPATH=src:. python benchmarks/turns.py [--tiny] [--ranks 2 4] [--turns 2000] [--steps 8]

A turn is announced by rank 0 and answered by each of the others, which do nothing in it here: what is left is the
leader's price. In its place ranks that run the same loop would hear each decision by ``dist.broadcast_object_list``,
the same message pickled over the default group of gloo. Which turns there are in a step is counted in a run: a tiny
model, sharded by FSDP2, weights sent to a server and proved. Ranks are processes of this machine, started by torchrun.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from tests.e2e.runs import write_run
from tests.ports import free_port

from lachesis.cli import main as lachesis
from lachesis.common.world import World, find_world
from lachesis.metrics.sinks.jsonl import read_metrics
from lachesis.train.distributed.control import ControlGroup, abort_collectives, init_process_group
from lachesis.train.distributed.follower import Follower
from lachesis.train.distributed.job import Job, join_job
from lachesis.train.distributed.leader import BUILD, Leader
from lachesis.train.distributed.messages import Turn
from lachesis.train.policy import Policy

LIMIT_S = 300.0
ROOT = Path(__file__).parents[1]
# As long as what most turns say.
DECISION = Turn(7, "canary", (tuple(range(16)),), parts=False, answers=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--turns", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--as-rank", choices=["idle", "train"], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--config", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank == "idle":
        measure_idle(options.turns, out=options.out)
    elif options.as_rank == "train":
        train(options.config, out=options.out)
    else:
        ranks, turns, steps = ([2], 50, 2) if options.tiny else (options.ranks, options.turns, options.steps)
        report(ranks, turns=turns, steps=steps)


def report(ranks: Sequence[int], *, turns: int, steps: int) -> None:
    write = sys.stdout.write
    write(f"load {os.getloadavg()[0]:.1f}, torch {torch.__version__}\n\n")
    write(
        "| ranks | a turn, ms | with answers, ms | a broadcast, ms | heard, ms | turns a step | a step, s | of it |\n"
    )
    write(f"{'|---' * 8}|\n")
    notes: list[str] = []
    for number in ranks:
        with tempfile.TemporaryDirectory() as directory:
            place = Path(directory)
            idle = torchrun(number, "idle", out=place / "idle.json", turns=turns)
            counted = torchrun(number, "train", out=place / "train.json", config=written(place, steps=steps))
        each, step_s = counted["turns"] / steps, counted["step_s"]
        share = each * idle["turn_ms"] / 1e3 / step_s
        write(
            f"| {number} | {idle['turn_ms']:.2f} | {idle['answered_ms']:.2f} | {idle['broadcast_ms']:.2f} "
            f"| {idle['round_ms']:.2f} | {each:.1f} | {step_s:.2f} | {share:.1%} |\n"
        )
        notes.append(f"\n{number} ranks, {steps} steps: {counted['methods']}\n")
    sys.stdout.writelines(notes)


def written(place: Path, *, steps: int) -> Path:
    return write_run(
        place / "run",
        run={"steps": steps},
        model={"device": "cpu"},
        engine={"kind": "embedded_server", "port": free_port()},
        bridge={"kind": "broadcast"},
    )


def torchrun(number: int, kind: str, *, out: Path, **options: Any) -> dict[str, Any]:
    words = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(number), "--standalone"]
    found = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    subprocess.run(
        [*command, __file__, "--as-rank", kind, "--out", str(out), *words],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(found)},
        stdout=sys.stderr,
        check=True,
    )
    return json.loads(out.read_text())


def measure_idle(turns: int, *, out: Path) -> None:
    """Of this rank: turns in which nobody does anything, and broadcasts of the same size."""
    world = find_world(os.environ)
    assert world is not None
    job = join_job(world, limit_s=LIMIT_S)
    control = ControlGroup(world, job.store, limit_s=LIMIT_S, secret=job.secret)
    found: dict[str, float] = {}
    if world.rank:
        Follower(control, build=lambda _: (idle_policy(), 0), end_process=lambda error: os._exit(1)).follow()
    else:
        with closing(Leader(control, abort=abort_collectives)) as leader:
            with leader.turn(BUILD, {}, what="building nothing"):
                pass
            for name, method, answers in (("turn_ms", "canary", False), ("answered_ms", "sees", True)):
                found[name] = timed(lambda m=method, a=answers: take_turn(leader, m, answers=a), times=turns)
    found |= broadcasts(world, job, times=turns)
    if world.rank == 0:
        out.write_text(json.dumps(found))


def idle_policy() -> Policy:
    nothing = SimpleNamespace(
        optimizer=SimpleNamespace(steps_taken=0), canary=lambda tokens: None, sees=lambda tokens: True
    )
    return cast(Policy, nothing)


def take_turn(leader: Leader, method: str, *, answers: bool) -> None:
    with leader.turn(method, tuple(range(16)), what="nothing", answers=answers):
        pass


def broadcasts(world: World, job: Job, *, times: int) -> dict[str, float]:
    """Milliseconds of a broadcast, by which each goes on; and until all are known to have heard it."""
    init_process_group(world, job.store, device=torch.device("cpu"), limit_s=LIMIT_S, secret=job.secret)

    def decide() -> None:
        dist.broadcast_object_list([DECISION if world.rank == 0 else None], src=0)
        dist.barrier()

    round_ms = timed(decide, times=times)
    barrier_ms = timed(dist.barrier, times=times)
    dist.destroy_process_group()
    return {"round_ms": round_ms, "broadcast_ms": max(0.0, round_ms - barrier_ms)}


def timed(call: Callable[[], object], *, times: int) -> float:
    """The median of a call, in milliseconds."""
    took = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return 1e3 * median(took)


def train(config: Path, *, out: Path) -> None:
    """A run, of which rank 0 counts the turns."""
    methods: Counter[str] = Counter()
    turn = Leader.turn

    @contextmanager
    def counting(leader: Leader, method: str, *arguments: Any, **options: Any) -> Iterator[list[Any]]:
        methods[method] += 1
        with turn(leader, method, *arguments, **options) as answers:
            yield answers

    Leader.turn = counting  # type: ignore[method-assign]
    sys.argv = ["lachesis", "train", str(config)]
    try:
        lachesis()
    except SystemExit as end:
        if end.code:
            raise
    if os.environ["RANK"] == "0":
        steps = read_metrics(config.parent / "runs" / "proof" / "metrics.jsonl").steps
        del methods[BUILD]
        said = ", ".join(f"{number} {name}" for name, number in methods.items())
        step_s = median(line.values["step_time"] for line in steps)
        out.write_text(json.dumps({"turns": methods.total(), "methods": said, "step_s": step_s}))


if __name__ == "__main__":
    main()
