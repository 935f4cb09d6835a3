"""Several measurements on one machine, started together: a start takes one core minutes, and GPUs have nothing to do.

    PYTHONPATH=src:. python benchmarks/side_by_side.py benchmarks/two_gpus.toml --logs DIRECTORY [--only NAME ...]

The file lists jobs: a command, the memory that it takes of each GPU at most, and its limit of time. A job begins as
soon as that memory is free of other jobs', in the order of the file; one that waits keeps what it waits for. One that
is ``alone`` begins once its GPUs have no other jobs, and keeps others off them: what times a step is. One that is
``after`` others waits for their end. The file is read again while jobs run, so that some can be added.

Each job's output is DIRECTORY/NAME.log; ``{logs}`` in a command is the directory. The exit code is 1 if a job failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

LOOK_S = 0.5
# How long what was asked to end has for it.
LAST_S = 10.0


@dataclass(frozen=True)
class Job:
    """Gigabytes by the number of a GPU; ``limit_s`` counts from the beginning, ``delay_s`` of it is waited first."""

    name: str
    command: str
    gb: Mapping[str, float]
    limit_s: float
    delay_s: float = 0.0
    alone: bool = False
    after: Sequence[str] = ()


@dataclass
class Running:
    job: Job
    process: subprocess.Popen[bytes]
    began: float = field(default_factory=time.monotonic)


def startable(jobs: Sequence[Job], *, running: Collection[Job], ended: Collection[str], card_gb: float) -> list[Job]:
    """Which of the jobs that have not begun may begin now, by memory and order."""
    held, kept = [*running], set[str]()
    found: list[Job] = []
    for job in jobs:
        if not set(job.after) <= set(ended):
            continue  # it keeps nothing: others may be what it waits for
        beside = [other for other in held if other.gb.keys() & job.gb.keys()]
        quiet = not any(other.alone for other in beside) and not (job.alone and beside)
        fits = all(sum(other.gb.get(gpu, 0.0) for other in held) + gb <= card_gb for gpu, gb in job.gb.items())
        if quiet and fits and not kept & job.gb.keys():
            held.append(job)
            found.append(job)
        else:
            kept |= job.gb.keys()
    return found


def read_jobs(path: Path) -> list[Job]:
    """Those of a file. ValueError where one is not as :class:`Job`, or two have one name."""
    entries = tomllib.loads(path.read_text()).get("job", [])
    try:
        jobs = [Job(**{**entry, "gb": {str(gpu): gb for gpu, gb in entry["gb"].items()}}) for entry in entries]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: a job has name, command, gb and limit_s: {error}") from error
    names = [job.name for job in jobs]
    twice = sorted({name for name in names if names.count(name) > 1})
    unknown = sorted({name for job in jobs for name in job.after} - {*names})
    if twice or unknown or not jobs:
        raise ValueError(f"{path}: no jobs, or names that stand there twice {twice} or in `after` alone {unknown}")
    return jobs


def begin(job: Job, *, logs: Path) -> Running:
    command = job.command.replace("{logs}", str(logs))
    if job.delay_s:
        command = f"sleep {job.delay_s}; {command}"
    with (logs / f"{job.name}.log").open("wb") as log:
        words, nothing = ["bash", "-c", command], subprocess.DEVNULL
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, stdin=nothing, start_new_session=True)
    return Running(job, process)


def outcome(one: Running) -> str | None:
    """How a job has ended, in words; what takes longer than it may is ended here. ``None`` while it runs."""
    code = one.process.poll()
    if code is None and time.monotonic() - one.began < one.job.limit_s:
        return None
    if code is None:
        end(one)
        return f"took more than {one.job.limit_s:.0f} s"
    return "ended" if code == 0 else f"failed with {code}"


def end(one: Running) -> None:
    """All of a job's processes."""
    for what, seconds in ((signal.SIGTERM, LAST_S), (signal.SIGKILL, LAST_S)):
        try:
            os.killpg(one.process.pid, what)
            one.process.wait(seconds)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def work(path: Path, *, logs: Path, card_gb: float, only: Collection[str]) -> list[str]:
    """Run all jobs; names of those that failed."""
    running: list[Running] = []
    results: dict[str, str] = {}
    started = time.monotonic()

    def say(name: str, words: str) -> None:
        sys.stdout.write(f"[{time.monotonic() - started:5.0f} s] {name} {words}\n")
        sys.stdout.flush()

    try:
        jobs = read_jobs(path)
        said = ""
        while True:
            try:
                jobs = read_jobs(path)
            except (OSError, ValueError) as error:  # it is being written: what runs goes on
                if said != str(error):
                    said = str(error)
                    say("the file", f"stays as it was read before: {said}")
            jobs = [job for job in jobs if not only or job.name in only]
            for one in list(running):
                if (words := outcome(one)) is not None:
                    running.remove(one)
                    results[one.job.name] = words
                    say(one.job.name, f"{words}, after {time.monotonic() - one.began:.0f} s")
            begun = {*results, *(one.job.name for one in running)}
            left = [job for job in jobs if job.name not in begun]
            if not left and not running:
                return [name for name, words in results.items() if words != "ended"]
            never = {name for job in jobs for name in job.after if only and name not in only}
            over = {*results, *never}
            for job in startable(left, running=[one.job for one in running], ended=over, card_gb=card_gb):
                running.append(begin(job, logs=logs))
                say(job.name, "begins")
            time.sleep(LOOK_S)
    finally:
        for one in running:
            end(one)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", type=Path)
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--card-gb", type=float, default=79.0, help="memory of each GPU")
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME")
    options = parser.parse_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    try:
        failed = work(options.jobs, logs=options.logs.resolve(), card_gb=options.card_gb, only=options.only)
    except ValueError as error:
        parser.error(str(error))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; read {options.logs}/NAME.log")


if __name__ == "__main__":
    main()
