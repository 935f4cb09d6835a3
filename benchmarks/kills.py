"""What becomes of `lachesis run` when its processes are killed: each of them three times, at random moments.

Run ``python benchmarks/kills.py [--kills 3] [--seed 0] [--only VICTIM ...] [--engine vllm] [--tiny]``. Each row of the
table is a run of its own, on the embedded engine's server, in which one process gets SIGKILL so many times. A killed
trainer is started again with ``--resume``, as its user would; nothing else is touched. A run passes where it ends well,
each batch that the rollout API made was trained on and none twice, the steps follow each other without a gap, and none
of its processes is left.

`chaos.py` has more kinds of faults, drawn at random, of single processes and pairs.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from tests.e2e.atropos_runs import BATCH, GROUP, PROBLEMS, Stage, stage, trained_ids, wait_for, write_model
from tests.e2e.runs import metrics, state
from tests.warm import COMMAND, FORKING

STEPS = 30
# A killed process is back, or its run has ended, after this at the latest.
BACK_S = 120.0
# The first moment at which all are at work, and how long after a step the last may be.
FIRST_STEP, SPREAD_S = 2, 2.0
ENGINES = ("embedded", "vllm")


@dataclass(frozen=True, slots=True)
class Victim:
    """A process of the run: the words of its command line, or of the one that it is the supervisor of."""

    words: str
    mode: str = "shared_vllm"
    supervisor: bool = False


VICTIMS = {
    "rollout API": Victim("run-api"),
    "environment": Victim("env arithmetic"),
    "trainer": Victim("", "shared_vllm"),
    "engine, shared weights": Victim("lachesis serve"),
    "engine, own weights": Victim("lachesis serve", "lora_only"),
    "supervisor of the API": Victim("run-api", supervisor=True),
    "supervisor of the environment": Victim("env arithmetic", supervisor=True),
    "supervisor of the engine, shared weights": Victim("lachesis serve", supervisor=True),
    "supervisor of the engine, own weights": Victim("lachesis serve", "lora_only", supervisor=True),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run had come to after its kills. ``back_s``: seconds until what was killed ran again, for each kill."""

    code: int
    kills: int
    back_s: tuple[float, ...]
    lost: int
    doubled: int
    gaps: int
    left: int
    seconds: float

    @property
    def passed(self) -> bool:
        return (self.code, self.lost, self.doubled, self.gaps, self.left) == (0, 0, 0, 0, 0)


def write_config(job: Stage, *, engine: str, kills: int) -> Path:
    """Engine, API and environment are the run's own; as many restarts as there are kills."""
    owned: dict[str, Any] = {"kind": "embedded_server" if engine == "embedded" else "vllm", "port": job.engine_port}
    flags = ["--env.max_num", PROBLEMS, "--env.group_size", GROUP, "--env.wait_timeout", 60]
    environment = {"name": "arithmetic", "args": [str(flag) for flag in flags]}
    path = job.write_config(services={"restarts": kills, "environment": environment})
    config = yaml.safe_load(path.read_text()) | {"engine": owned}
    # What was trained after the last checkpoint is trained anew, with other batches.
    config["checkpoint"] = {**config.get("checkpoint", {}), "every_steps": 1}
    if engine == "vllm":
        config["model"]["dtype"] = "float32"
    path.write_text(yaml.safe_dump(config))
    return path


def start(job: Stage, config: Path, *words: str, forked: bool) -> None:
    job.start("trainer", "run", config, *words, python=(sys.executable, "-c", FORKING if forked else COMMAND))


def find(job: Stage, victim: Victim) -> psutil.Process | None:
    """The process as it runs now; None while it is not there."""
    trainer = psutil.Process(job.processes["trainer"].pid)
    if not victim.words:
        return trainer
    try:
        process = job.child("trainer", victim.words)
        found = job.supervisor("trainer", victim.words) if victim.supervisor else process
    except (AssertionError, psutil.NoSuchProcess):
        return None
    return found if found.status() != psutil.STATUS_ZOMBIE else None


def kill_at_random(job: Stage, victim: Victim, *, draws: random.Random, step: int) -> psutil.Process:
    """SIGKILL up to two seconds after ``step``, wherever the run is then; who got it."""
    job.wait_step(step)
    time.sleep(draws.uniform(0, SPREAD_S))
    wait_for(lambda: find(job, victim) is not None, "the victim", timeout_s=BACK_S)
    process = find(job, victim)
    assert process is not None
    process.kill()
    return process


def wait_back(job: Stage, victim: Victim, killed: psutil.Process) -> float:
    """Seconds until another process stands in the killed one's place."""
    began = time.monotonic()

    def back() -> bool:
        assert job.processes["trainer"].poll() is None, job.log("trainer")
        found = find(job, victim)
        return found is not None and found != killed

    wait_for(back, "what was killed", timeout_s=BACK_S)
    return time.monotonic() - began


def started_by(job: Stage) -> list[psutil.Process]:
    """What the trainer has started: by parent or, as all that a test forks are children of one server, by directory."""
    trainer = job.processes["trainer"].pid
    found = psutil.Process(trainer).children(recursive=True)
    here = str(job.directory.resolve())
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # it has just ended
            if process.pid != trainer and process not in found and process.cwd() == here:
                found.append(process)
    return found


def resume(job: Stage, config: Path, below: Sequence[psutil.Process], *, forked: bool) -> float:
    """Start the trainer again, once those that it had started have followed it; seconds until they had."""
    began = time.monotonic()
    job.processes["trainer"].wait()
    wait_for(lambda: not any(map(runs, below)), "the end of what the trainer had started", timeout_s=BACK_S)
    seconds = time.monotonic() - began
    start(job, config, "--resume", forked=forked)
    return seconds


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def trial(
    directory: Path, model: Path, victim: Victim, *, kills: int, seed: int, engine: str = "embedded",
    steps: int = STEPS, forked: bool = False,
) -> Outcome:  # fmt: skip
    """One run, in which a process is killed at ``kills`` random moments, one in each part of the run."""
    draws, began = random.Random(seed), time.monotonic()
    parts = range(FIRST_STEP, steps - 2, max(1, (steps - 2 - FIRST_STEP) // kills))
    moments = [draws.randrange(low, min(low + parts.step, steps - 2)) for low in list(parts)[:kills]]
    everyone: set[psutil.Process] = set()
    back = []
    with stage(directory, model=model, mode=victim.mode, steps=steps) as job:
        config = write_config(job, engine=engine, kills=kills)
        start(job, config, forked=forked)
        for step in moments:
            job.wait_step(step)
            below = started_by(job)
            everyone |= set(below)
            killed = kill_at_random(job, victim, draws=draws, step=step)
            if victim.words:
                back.append(wait_back(job, victim, killed))
            else:
                back.append(resume(job, config, below, forked=forked))
        code = job.wait_trainer(timeout_s=600)
        left = [process for process in everyone if runs(process)]
        found = judge(job, code=code, back=back, left=len(left), steps=steps, seconds=time.monotonic() - began)
        if not found.passed:
            sys.stderr.write(f"{found}, set aside {set_aside(job)}\n{job.log('trainer')[-6000:]}")
        return found


def judge(job: Stage, *, code: int, back: Sequence[float], left: int, steps: int, seconds: float) -> Outcome:
    """What is on the tape and in the metrics, against one batch a step."""
    times = Counter(trained_ids(job.run_dir))
    batches = {int(one.partition("-")[0]) for one in times}
    done = [line.step for line in metrics(job.run_dir).steps]
    return Outcome(
        code=code or int(state(job.run_dir)["status"] != "finished"),
        kills=len(back),
        back_s=tuple(back),
        lost=steps * BATCH // GROUP - len(times) + len(set(range(steps)) - batches),
        doubled=sum(count - 1 for count in times.values()),
        gaps=len(set(range(1, steps + 1)) ^ set(done)) + len(done) - len(set(done)),
        left=left,
        seconds=seconds,
    )


def set_aside(job: Stage) -> dict[int, float]:
    """Groups that could not be trained on, by step, where there are any."""
    return {line.step: count for line in metrics(job.run_dir).steps if (count := line.values["dropped_groups"])}


def row(name: str, found: Outcome) -> str:
    """A line of the table."""
    times = f"{statistics.median(found.back_s):.1f} s (at most {max(found.back_s):.1f})"
    end = "goes on" if found.passed else "FAILED"
    counts = f"{found.kills} | {end} | {found.lost} | {found.doubled} | {found.left}"
    return f"| {name} | {counts} | {times} | {found.seconds:.0f} s |"


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", choices=sorted(VICTIMS), default=list(VICTIMS))
    parser.add_argument("--engine", choices=ENGINES, default="embedded")
    parser.add_argument("--tiny", action="store_true", help="the trainer is killed once: that it runs")
    args = parser.parse_args()
    if args.tiny:
        args.kills, args.only = 1, ["trainer"]
    say(f"{args.kills} kills each, seed {args.seed}, engine {args.engine}, {STEPS} steps of {BATCH} sequences\n")
    say("| killed | times | the run | groups lost | trained on twice | left behind | back after | whole run |")
    say("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory) / "model")
        found = {}
        for number, name in enumerate(args.only):
            place = Path(directory) / f"run{number}"
            place.mkdir()
            seed = args.seed * 1000 + number
            found[name] = trial(place, model, VICTIMS[name], kills=args.kills, seed=seed, engine=args.engine)
            say(row(name, found[name]))
    sys.exit(not all(one.passed for one in found.values()))


if __name__ == "__main__":
    main()
