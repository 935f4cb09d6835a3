"""A slurm of this machine alone: what `sbatch`, `srun` and `scontrol` do for one job, by local processes.

Its nodes are addresses of the loopback, 127.0.0.1 to 127.0.0.N, so that what listens on one is reached by its name. It
refuses what slurm refuses of what our files ask: unknown options, nodes that are not the job's, tasks that do not fit.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.paths import ROOT

JOB = "4711"
_BATCH = {"job-name", "chdir", "output", "nodes", "ntasks-per-node", "gpus-per-node", "mem", "time", "partition",
          "account", "no-kill", "signal", "open-mode", "exclusive", "requeue", "qos"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended: its last exit code, what its last attempt wrote, and how often it was queued again."""

    code: int
    output: str
    restarts: int


def sbatch(file: Path, *arguments: str, bin_dir: Path, timeout_s: float, warn_after: Path | None = None) -> Ended:
    """Run the job of a file until it is not queued again.

    Args:
        bin_dir: gets the commands that the file finds in its PATH.
        warn_after: a file; once it is there the batch shell gets the signal of ``--signal``, in the first attempt.
    """
    options = batch_options(file.read_text())
    nodes = [f"127.0.0.{number + 1}" for number in range(int(options["nodes"]))]
    _install(bin_dir)
    found = re.fullmatch(r"B:(\w+)@\d+", options["signal"])
    assert found, options["signal"]
    environment = os.environ | {
        "PATH": f"{bin_dir}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_ID": JOB,
        "SLURM_JOB_NODELIST": f"127.0.0.[1-{len(nodes)}]",
        "SLURM_NTASKS_PER_NODE": options["ntasks-per-node"],
        "FAKE_SLURM": str(bin_dir),
    }
    for restarts in range(10):
        counted = {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
        job = subprocess.Popen(
            ["bash", str(file), *arguments],
            env=environment | counted,
            cwd=options["chdir"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        if warn_after is not None and restarts == 0:
            threading.Thread(target=_warn, args=(job, found[1], warn_after), daemon=True).start()
        try:
            output, _ = job.communicate(timeout=timeout_s)
        finally:
            _end_group(job.pid)
            for task in bin_dir.glob("task-*"):
                _end_group(int(task.name.removeprefix("task-")))
                task.unlink()
        if not (bin_dir / "requeue").exists():
            return Ended(job.returncode, output, restarts)
        (bin_dir / "requeue").unlink()
    raise AssertionError("the job is queued again for ever")


def batch_options(text: str) -> dict[str, str]:
    """The options of the file's head; sbatch reads them up to the first command."""
    found: dict[str, str] = {}
    for line in text.splitlines()[1:]:
        if line and not line.startswith("#"):
            break
        if line.startswith("#SBATCH "):
            (word,) = shlex.split(line.removeprefix("#SBATCH "))
            name, _, value = word.removeprefix("--").partition("=")
            assert word.startswith("--") and name in _BATCH, f"sbatch: unrecognized option {word!r}"
            found[name] = value
    return found


def srun(words: Sequence[str]) -> int:
    """Start the tasks of a step, and wait for them; the highest exit code of theirs."""
    given, command = _parse(words)
    allocated = hostnames(os.environ["SLURM_JOB_NODELIST"])
    nodes = given.nodelist.split(",")
    if not set(nodes) <= set(allocated) or len(nodes) != given.nodes:
        sys.exit(f"srun: error: Requested node configuration is not available: {nodes} of {allocated}")
    if given.ntasks > given.nodes * given.ntasks_per_node or given.ntasks_per_node > int(
        os.environ["SLURM_NTASKS_PER_NODE"]
    ):
        sys.exit(f"srun: error: Unable to create step: More processors requested than permitted: {given}")
    tasks = [_task(given, command, rank, nodes) for rank in range(given.ntasks)]

    def end(number: int, frame: object) -> None:
        for task in tasks:
            _end_group(task.pid)

    signal.signal(signal.SIGTERM, end)
    return _wait(tasks, kill=given.kill_on_bad_exit != "0")


def hostnames(nodelist: str) -> list[str]:
    """What `scontrol show hostnames` prints of ``127.0.0.[1-3]``."""
    found = re.fullmatch(r"(.*)\[(\d+)-(\d+)\]", nodelist)
    assert found, nodelist
    return [f"{found[1]}{number}" for number in range(int(found[2]), int(found[3]) + 1)]


def scontrol(words: Sequence[str]) -> int:
    """`show hostnames LIST` and `requeue JOB`."""
    if list(words[:2]) == ["show", "hostnames"]:
        sys.stdout.writelines(f"{name}\n" for name in hostnames(words[2]))
        return 0
    assert list(words) == ["requeue", JOB], words
    Path(os.environ["FAKE_SLURM"], "requeue").touch()
    return 0


def _parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser("srun", allow_abbrev=False)
    parser.add_argument("--overlap", action="store_true", required=True)
    parser.add_argument("--cpu-bind", choices=["none"], required=True)
    parser.add_argument("--kill-on-bad-exit", choices=["0", "1"])
    parser.add_argument("--no-kill", action="store_true")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--ntasks", type=int, required=True)
    parser.add_argument("--ntasks-per-node", type=int, required=True)
    parser.add_argument("--nodelist", required=True)
    parser.add_argument("--output")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args(words)
    return given, given.command


def _task(given: argparse.Namespace, command: Sequence[str], rank: int, nodes: Sequence[str]) -> subprocess.Popen[str]:
    place, local = divmod(rank, given.ntasks_per_node)
    own = {
        "SLURM_PROCID": rank,
        "SLURM_NTASKS": given.ntasks,
        "SLURM_LOCALID": local,
        "SLURM_NODEID": place,
        "SLURMD_NODENAME": nodes[place],
    }
    with ExitStack() as files:
        log = given.output and files.enter_context(Path(given.output.replace("%t", str(rank))).open("a"))
        task = subprocess.Popen(
            command,
            env=os.environ | {name: str(value) for name, value in own.items()},
            stdout=log,
            stderr=log and subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )
    Path(os.environ["FAKE_SLURM"], f"task-{task.pid}").touch()  # what is left of a job at its end is ended
    return task


def _wait(tasks: Sequence[subprocess.Popen[str]], *, kill: bool) -> int:
    """As --kill-on-bad-exit=1 has it: where one ends badly the others are ended, to ``kill`` them."""
    codes: dict[int, int] = {}
    while len(codes) < len(tasks):
        pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        codes[pid] = 128 - code if code < 0 else code
        if codes[pid] and kill:
            for task in tasks:
                if task.pid not in codes:
                    _end_group(task.pid)
    return max(codes.values())


def _install(bin_dir: Path) -> None:
    for name in ("srun", "scontrol"):
        path = bin_dir / name
        path.write_text(
            f"#!{sys.executable} -S\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
            f"from tests.slurm import {name}\nsys.exit({name}(sys.argv[1:]))\n"
        )
        path.chmod(0o755)


def _warn(job: subprocess.Popen[str], name: str, after: Path) -> None:
    while job.poll() is None and not after.exists():
        threading.Event().wait(0.02)
    if job.poll() is None:
        job.send_signal(signal.Signals[f"SIG{name}"])


def _end_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
