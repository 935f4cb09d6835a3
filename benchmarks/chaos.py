"""Faults drawn at random against every process of a run: two engines, rollout API, two environments and trainer.

Run ``python benchmarks/chaos.py --faults 200 --seed 1 --out chaos.jsonl [--engine vllm] [--minutes 10]``, as root where
disks and networks shall take part, with a C compiler where clocks shall. With ``--engine mixed`` the first engine is
vLLM and the second embedded, which a small machine has room for. Each process is started by its own command (with
``--forked`` it is forked from one that has imported what it needs), in network namespaces of its own, with a small file
system for the trainer and one for the API. A service that ends is started again after a second, as a service manager
would; a trainer that ends is resumed once the fault is over, as its user would. A run takes some faults, one after the
other; then the trainer gets SIGTERM and is resumed for its last steps. A line of the file is a run; where runs of a
seed are there already, the others are added.

A run is right if after each fault it goes on, or its trainer ended with one sentence (and no traceback of ours), if
each batch was trained on and none twice, the steps follow each other without a gap, no process is left behind, and each
server ended within ten seconds of SIGTERM. ``--table FILE ...`` makes a table of them.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import yaml
from tests import warm
from tests.contracts.vllm_server import ENVIRONMENT, SMALL
from tests.e2e.atropos_runs import GROUP, PROBLEMS, RANK, trained_ids, write_model
from tests.e2e.runs import environment, metrics, state
from tests.ports import free_port
from tests.warm import FORKING

BATCH = 64
PROCESSES = ("trainer", "rollout API", "environment 1", "environment 2", "engine 1", "engine 2")
TARGETS = (*((name,) for name in PROCESSES), *itertools.combinations(PROCESSES, 2))
KINDS = ("kill", "stop", "memory", "clock", "disk", "network")
_WEIGHTS = {"kill": 3, "stop": 4, "memory": 2, "clock": 1, "disk": 2, "network": 2}
# For how long; None is for ever, that is until the run has ended or has gone on without.
STOPS_S: tuple[float | None, ...] = (3.0, 8.0, 20.0, None)
SHORT_S: tuple[float | None, ...] = (6.0, None)
CLOCK_STEPS_S = (-86_400, -3_600, -60, 60, 3_600, 86_400)
BRIDGES = ("lora_only", "reload", "broadcast")
ENGINES = ("embedded", "vllm", "mixed")
# vLLM's attention on the CPU knows no heads smaller than 32.
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
# The run has to say within that time what is stopped, and a server has to end after SIGTERM.
TOLD_S, ENDS_S = 5.0, 10.0
# Longest wait for the next step after a fault, and for a start, of vLLM; on a machine with other work.
RECOVER_S, VLLM_S = 120.0, 600.0
DISK_MB = 256
_TOLD = re.compile(r"is stopped by a signal|has not answered|^error: |is lost|gone|does not answer", re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last)"
_MARK = "LACHESIS_CHAOS"
# A forked process enters its network by itself.
_ENTER = """
import ctypes, os
if ctypes.CDLL(None).setns(os.open("/run/netns/{}", os.O_RDONLY), 0x40000000):
    raise OSError("no way into the network {}")
"""


_CLOCK = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static volatile long *moved;
static long by(void) {
  if (!moved) {
    static long none;
    const char *path = getenv("CHAOS_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *found = file < 0 ? MAP_FAILED : mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    if (file >= 0) close(file);
    moved = found == MAP_FAILED ? &none : found;
  }
  return *moved;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
  int failed = syscall(SYS_clock_gettime, clock, now);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += by();
  return failed;
}
int gettimeofday(struct timeval *now, void *zone) {
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  now->tv_sec = found.tv_sec;
  now->tv_usec = found.tv_nsec / 1000;
  return 0;
}
time_t time(time_t *at) {
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  if (at) *at = found.tv_sec;
  return found.tv_sec;
}
"""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one process or two at once. ``seconds`` is how long, or how far a clock is set."""

    number: int
    kind: str
    names: tuple[str, ...]
    seconds: float | None = None

    def __str__(self) -> str:
        lasts = "for ever" if self.seconds is None else f"for {self.seconds:g} s"
        what = {
            "kill": "killed",
            "stop": f"stopped {lasts}",
            "memory": f"no more memory {lasts}",
            "clock": f"clock set by {self.seconds or 0:+g} s",
            "disk": f"disk full {lasts}",
            "network": f"network gone {lasts}",
        }[self.kind]
        return f"{' and '.join(self.names)}: {what}"


def draw(number: int, *, seed: int, kinds: Sequence[str]) -> Fault:
    """The fault of that number, whatever was drawn before; in 21 of them each process and each pair takes its turn."""
    draws = random.Random(f"{seed} {number}")
    order = random.Random(f"{seed} {number // len(TARGETS)}").sample(TARGETS, len(TARGETS))
    kind = draws.choices(kinds, [_WEIGHTS[kind] for kind in kinds])[0]
    names = order[number % len(TARGETS)]
    if kind == "disk":
        names = tuple(name for name in names if name in ("trainer", "rollout API")) or ("trainer", "rollout API")
    if kind == "network":
        names = tuple(name for name in names if name.startswith("environment")) or ("all but the environments",)
    seconds: float | None = None
    if kind == "stop":
        seconds = draws.choice(STOPS_S)
    elif kind in ("memory", "disk", "network"):
        seconds = draws.choice(SHORT_S)
    elif kind == "clock":
        seconds = draws.choice(CLOCK_STEPS_S)
    if kind == "memory":  # limits of a process end with it
        seconds = 6.0
    return Fault(number, kind, names, seconds)


@dataclass
class Member:
    """A process of the run under one name, as it runs now."""

    name: str
    command: Sequence[str | Path]
    log: Path
    variables: dict[str, str]
    namespace: str = ""
    python: Sequence[str] = (sys.executable, "-m", "lachesis")
    popen: type[subprocess.Popen[str]] = subprocess.Popen
    process: subprocess.Popen[str] | None = None
    codes: list[int] = field(default_factory=list)
    began: int = 0  # where its log was when it was started

    @property
    def clock(self) -> Path:
        return self.log.with_suffix(".clock")

    def start(self, *words: str) -> None:
        forked = self.popen is not subprocess.Popen
        inside = ["ip", "netns", "exec", self.namespace] if self.namespace and not forked else []
        self.began = self.size()
        with self.log.open("a") as log:
            self.process = self.popen(
                [*inside, *self.python, *map(str, self.command), *words], env=environment(**self.variables),
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=self.log.parent, text=True,
            )  # fmt: skip

    def family(self) -> list[psutil.Process]:
        """The process and all below it."""
        if self.process is None or self.process.poll() is not None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            main = psutil.Process(self.process.pid)
            return [main, *main.children(recursive=True)]
        return []

    def text(self, since: int = 0) -> str:
        with contextlib.suppress(FileNotFoundError), self.log.open(errors="replace") as log:
            log.seek(since)
            return log.read()
        return ""

    def size(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0


@dataclass(frozen=True, slots=True)
class Places:
    """Where a run has its files, and the names of its networks; empty where all share the machine's."""

    root: Path
    trainer: Path
    api: Path
    network: str
    environments: tuple[str, str]

    def link(self, number: int) -> None:
        """Connect the network of an environment with the run's."""
        one, other = f"e{number}", self.environments[number]
        _ip("link", "add", one, "netns", self.network, "type", "veth", "peer", "name", "wire", "netns", other)
        for namespace, name, host in ((self.network, one, 1), (other, "wire", 2)):
            _ip("-n", namespace, "address", "add", f"10.77.{number}.{host}/30", "dev", name)
            _ip("-n", namespace, "link", "set", name, "up")

    def cut(self, number: int) -> None:
        _ip("-n", self.network, "link", "delete", f"e{number}")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def places(root: Path, *, networks: bool, disks: bool) -> Iterator[Places]:
    """Make them, and take them away again."""
    stem = f"chaos-{os.getpid()}-{uuid.uuid4().hex[:4]}"
    names = [f"{stem}-{name}" for name in ("run", "e0", "e1")] if networks else ["", "", ""]
    made = Places(root, root / "trainer", root / "api", names[0], (names[1], names[2]))
    with ExitStack() as stack:
        for directory in (made.trainer, made.api):
            directory.mkdir(parents=True)
            if disks:
                subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "chaos", directory], check=True)
                stack.callback(subprocess.run, ["umount", "-l", directory], check=True)
        if networks:
            for name in names:
                _ip("netns", "add", name)
                stack.callback(_ip, "netns", "delete", name)
                _ip("-n", name, "link", "set", "lo", "up")
            for number in range(2):
                made.link(number)
        yield made


@dataclass(frozen=True, slots=True)
class Setting:
    """What the processes of a run are."""

    model: Path
    engine: str = "embedded"
    bridge: str = "lora_only"
    device: str = "cpu"
    kinds: tuple[str, ...] = KINDS
    forked: bool = False
    wait_s: float = 40.0

    @property
    def recover_s(self) -> float:
        """How long the next step may take: where vLLM may have to start again, as long as its start."""
        return RECOVER_S if self.engine == "embedded" else VLLM_S

    def is_vllm(self, number: int) -> bool:
        """Whether the engine of that number is vLLM."""
        return self.engine == "vllm" or (self.engine == "mixed" and number == 0)


class Run:
    """The processes of one run, those that end started again."""

    def __init__(self, at: Places, setting: Setting, *, clocks: Path | None) -> None:
        self.at, self.setting, self.clocks = at, setting, clocks
        self.mark = uuid.uuid4().hex
        self.flaws: list[str] = []
        self.sentences: list[str] = []
        self._over = threading.Event()
        ports = [8002, 9001, 9002] if at.network else [free_port() for _ in range(3)]
        self.api_port, self.engine_ports = ports[0], ports[1:]
        self.members = {name: self._member(name) for name in PROCESSES}
        self._keeper = threading.Thread(target=self._keep, daemon=True)

    @property
    def trainer(self) -> Member:
        return self.members["trainer"]

    @property
    def run_dir(self) -> Path:
        return self.at.trainer / "runs" / "job"

    def _member(self, name: str) -> Member:
        number = int(name[-1]) - 1 if name[-1].isdigit() else 0
        command = {"t": self._train, "r": self._api, "e": self._engine}[name[0]]
        words = self._environment(number) if name.startswith("environment") else command(number)
        log = self.at.root / f"{name.replace(' ', '-')}.log"
        variables = {
            "PYTHONPATH": os.pathsep.join(filter(None, (environment()["PYTHONPATH"], os.environ.get("PYTHONPATH")))),
            _MARK: self.mark,
            "LACHESIS_SESSION_DIR": str(self.at.root / "sessions"),
            warm.REGISTER: str(self.at.root / "forked.jsonl"),
        } | {"embedded": {}, "vllm": SMALL, "mixed": ENVIRONMENT}[self.setting.engine]
        if self.clocks is not None:
            variables |= {"LD_PRELOAD": str(self.clocks), "CHAOS_CLOCK": str(log.with_suffix(".clock"))}
        namespace = self.at.environments[number] if name.startswith("environment") else self.at.network
        enter = _ENTER.format(namespace, namespace) if namespace else ""
        forking: dict[str, Any] = {"python": (sys.executable, "-c", enter + FORKING)}
        vllm = name.startswith("engine") and self.setting.is_vllm(number)
        forking["popen"] = warm.VllmPopen if vllm else warm.Popen
        return Member(name, words, log, variables, namespace, **(forking if self.setting.forked else {}))

    def _train(self, number: int) -> list[str | Path]:
        return ["train", self.at.root / "job.yaml"]

    def _api(self, number: int) -> list[str | Path]:
        bound = "0.0.0.0" if self.at.network else "127.0.0.1"
        return ["run-api", "--strict", "--host", bound, "--port", str(self.api_port), "--state-dir",
                self.at.api / "state", "--ack-timeout", "600", "--env-timeout", "15"]  # fmt: skip

    def _engine(self, number: int) -> list[str | Path]:
        setting, bound = self.setting, "0.0.0.0" if self.at.network else "127.0.0.1"
        words: list[str | Path] = ["serve", "--model", setting.model, "--host", bound, "--port",
                                   str(self.engine_ports[number]), "--dtype", "float32", "--adapter-root",
                                   self.at.trainer, "--max-model-len", "32"]  # fmt: skip
        words += ["--enable-lora", "--max-lora-rank", str(RANK)] if setting.bridge == "lora_only" else []
        return [
            *words,
            *(["--enforce-eager"] if setting.is_vllm(number) else ["--engine", "embedded", "--device", setting.device]),
        ]

    def _environment(self, number: int) -> list[str | Path]:
        host = f"10.77.{number}.1" if self.at.network else "127.0.0.1"
        engines = ",".join(f"http://{host}:{port}" for port in self.engine_ports)
        return ["env", "arithmetic", "serve", "--env.rollout_server_url", f"http://{host}:{self.api_port}",
                "--openai.base_url", engines, "--env.tokenizer_name", self.setting.model, "--env.max_num",
                str(PROBLEMS), "--env.group_size", str(GROUP), "--env.wait_timeout", "600", "--openai.timeout", "20",
                "--env.max_batches_offpolicy", "1", "--env.linger", "2", "--env.seed", str(number)]  # fmt: skip

    def write_config(self) -> None:
        setting = self.setting
        lora = setting.bridge == "lora_only"
        config = {
            "run": {"name": "job", "dir": str(self.at.trainer / "runs"), "steps": 100_000},
            "model": {"path": str(setting.model), "device": "cpu", "dtype": "float32"},
            "adapter": {"kind": "lora", "r": RANK, "alpha": 2 * RANK} if lora else {"kind": "none"},
            "source": {
                "kind": "atropos",
                "url": f"http://127.0.0.1:{self.api_port}",
                "batch_size": BATCH,
                "wait_s": setting.wait_s,
            },
            "engine": {
                "kind": "http",
                "urls": [f"http://127.0.0.1:{port}" for port in self.engine_ports],
                "wait_s": VLLM_S,
                "takeover": True,
            },
            "bridge": {"kind": setting.bridge},
            "deadlines": {"sync_s": setting.wait_s, "progress_s": setting.wait_s / 4},
            "optimizer": {"learning_rate": 1e-4},
            "checkpoint": {"save_final": False, "every_steps": 1},
            "logging": {"report_every_steps": 100_000},
        }
        (self.at.root / "job.yaml").write_text(yaml.safe_dump(config))

    def start(self) -> None:
        self.write_config()
        for member in self.members.values():
            if self.clocks is not None:
                member.clock.write_bytes(bytes(8))
            member.start()
        self._keeper.start()

    def _keep(self) -> None:
        """Start services that have ended again, but for those that ended in peace."""
        while not self._over.wait(1.0):
            for member in self.members.values():
                code = None if member is self.trainer or member.process is None else member.process.poll()
                if code is not None:
                    member.codes.append(code)
                    member.process = None
                    if code != 0:
                        member.start()

    def steps_done(self) -> int:
        path = self.run_dir / "metrics.jsonl"
        return path.read_text().count('"type": "step"') if path.is_file() else 0

    def trainer_ended(self) -> int | None:
        return self.trainer.process.poll() if self.trainer.process is not None else None

    def note_end(self, code: int) -> None:
        """What an ended trainer said: one sentence, or nothing where it was killed."""
        text = self.trainer.text(self.trainer.began)
        found = re.findall(r"^error: .*", text, re.MULTILINE)
        if code in (-signal.SIGKILL, 128 + signal.SIGKILL):
            return
        if len(found) != 1 or _TRACEBACK in text:
            self.flaws.append(f"the trainer ended with {code} and {len(found)} sentences: {text[-1500:]}")
        self.sentences += found

    def resume(self) -> None:
        """Start the trainer again, whether or not it has a checkpoint yet."""
        saved = any((self.run_dir / "checkpoints").glob("step_*"))
        self.trainer.start("--resume" if saved else "--overwrite")

    def wait(self, done: Callable[[], bool], *, seconds: float, resumes: bool) -> bool:
        """Until ``done``; a trainer that ends on the way is resumed, or ends the wait. Whether it was done."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if done():
                return True
            code = self.trainer_ended()
            if code is not None:
                if not resumes:
                    return False
                self.note_end(code)
                time.sleep(1.0)
                self.resume()
            time.sleep(0.1)
        return False

    def wait_started(self) -> bool:
        """Wait until two steps are done, as long as a start of vLLM may take. Return True if they were."""
        return self.wait(lambda: self.steps_done() >= 2, seconds=VLLM_S * _busy(), resumes=True)

    def wait_steps(self, more: int) -> bool:
        wanted, seconds = self.steps_done() + more, self.setting.recover_s * _busy()
        return self.wait(lambda: self.steps_done() >= wanted, seconds=seconds, resumes=True)

    def stop(self) -> None:
        """End all by SIGTERM, the trainer first; what does not end is a flaw, and is killed."""
        self._over.set()
        self._keeper.join()
        # The seconds are those of a machine that has a core for it.
        limit_s = ENDS_S * _busy()
        for names in (("trainer",), PROCESSES[1:]):
            running = [one for name in names if (one := self.members[name]).process is not None]
            for member in running:
                assert member.process is not None
                member.process.terminate()
            end = time.monotonic() + limit_s
            for member in running:
                assert member.process is not None
                try:
                    member.process.wait(max(0.1, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    if member is not self.trainer:
                        self.flaws.append(f"{member.name} did not end within {limit_s:.0f} s of SIGTERM")
                    for process in member.family():
                        _gone_well(process.kill)
                    member.process.wait()

    def left(self) -> list[psutil.Process]:
        """Processes of this run that are still there, by a variable of their environment, or as forked ones say."""
        found = [process for process, _ in warm.forked(self.at.root / "forked.jsonl") if _runs(process)]
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, OSError):
                if process.environ().get(_MARK) == self.mark and _runs(process):
                    found.append(process)
        return found


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _busy() -> float:
    """By how much a machine with too little cores for its work is slower."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def clock_library(directory: Path) -> Path | None:
    """A library that moves the wall clock, and no other, by what a file says; None where there is no C compiler.

    libfaketime has Python's sleep fail, which waits for a moment of the monotonic clock (its version 0.9.10).
    """
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    directory.mkdir(parents=True, exist_ok=True)
    source, library = directory / "clock.c", directory / "clock.so"
    source.write_text(_CLOCK)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    return library


def possible_kinds() -> tuple[str, ...]:
    """The kinds of faults that this machine and user can make."""
    name = f"chaos-try-{os.getpid()}"
    tries = {
        "disk": (["mount", "-t", "tmpfs", "chaos"], ["umount"]),
        "network": (["ip", "netns", "add"], ["ip", "netns", "delete"]),
    }
    missing = {"clock"} if shutil.which("cc") is None else set[str]()
    with tempfile.TemporaryDirectory() as directory:
        for kind, (make, unmake) in tries.items():
            what = directory if kind == "disk" else name
            if shutil.which(make[0]) is None or subprocess.run([*make, what], capture_output=True).returncode:
                missing.add(kind)
            else:
                subprocess.run([*unmake, what], check=True)
    return tuple(kind for kind in KINDS if kind not in missing)


@contextmanager
def struck(run: Run, fault: Fault, draws: random.Random) -> Iterator[None]:
    """The fault lasts as long as the block; then all is as it was, and what was stopped for ever is killed."""
    with ExitStack() as stack:
        if fault.kind == "disk":
            for name in fault.names:
                stack.callback(_fill(run.at.trainer if name == "trainer" else run.at.api))
        elif fault.kind == "network":
            _cut(run, fault, stack)
        else:
            for name in fault.names:
                _strike(run.members[name], fault, draws, stack)
        yield


def _strike(member: Member, fault: Fault, draws: random.Random, stack: ExitStack) -> None:
    """One process: killed and stopped is any of its family, the others' fault is all of its family's."""
    if fault.kind == "clock":
        offset = int.from_bytes(member.clock.read_bytes(), sys.byteorder, signed=True) + int(fault.seconds or 0)
        with member.clock.open("r+b") as file:  # it is mapped
            file.write(offset.to_bytes(8, sys.byteorder, signed=True))
        return
    family = member.family()
    for process in [draws.choice(family)] if family and fault.kind in ("kill", "stop") else family:
        with contextlib.suppress(psutil.NoSuchProcess):
            if fault.kind == "kill":
                process.kill()
            elif fault.kind == "stop":
                process.suspend()
                stack.callback(_gone_well, process.resume if fault.seconds is not None else process.kill)
            else:
                limits = process.rlimit(psutil.RLIMIT_AS)
                process.rlimit(psutil.RLIMIT_AS, (process.memory_info().vms, limits[1]))
                stack.callback(_gone_well, partial(process.rlimit, psutil.RLIMIT_AS, limits))


def _gone_well(action: Callable[[], object]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        action()


def _fill(directory: Path) -> Callable[[], None]:
    """Fill a file system to its last byte; what empties it again."""
    ballast = directory / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (1 << 20, 1 << 12):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
    return lambda: ballast.unlink(missing_ok=True)


def _cut(run: Run, fault: Fault, stack: ExitStack) -> None:
    for name in fault.names:
        if name.startswith("environment"):
            number = int(name[-1]) - 1
            run.at.cut(number)
            stack.callback(run.at.link, number)
        else:
            _ip("-n", run.at.network, "link", "set", "lo", "down")
            stack.callback(_ip, "-n", run.at.network, "link", "set", "lo", "up")


def endure(run: Run, fault: Fault, draws: random.Random) -> dict[str, Any]:
    """One fault and what the run makes of it: that it goes on, or the sentence with which it ended."""
    began, since, sentences, steps = time.monotonic(), run.trainer.size(), len(run.sentences), run.steps_done()
    with struck(run, fault, draws):
        if fault.kind in ("kill", "clock"):
            pass
        elif fault.seconds is not None:
            time.sleep(fault.seconds)
        elif "trainer" in fault.names and fault.kind == "stop":
            time.sleep(2 * TOLD_S)
        else:
            on = lambda: time.monotonic() - began > 2 * TOLD_S and run.steps_done() >= steps + 3  # noqa: E731
            recover_s = run.setting.recover_s
            if not run.wait(on, seconds=recover_s * _busy(), resumes=False) and run.trainer_ended() is None:
                run.flaws.append(f"{fault}: neither went on nor ended within {recover_s:g} s")
        told = bool(_TOLD.search(run.trainer.text(since)))
    watched = [name for name in fault.names if name.startswith("engine") or name == "rollout API"]
    lasts = fault.kind == "stop" and (fault.seconds is None or fault.seconds > TOLD_S + 2)
    if lasts and watched and "trainer" not in fault.names and not told:
        run.flaws.append(f"{fault}: the run said nothing of it")
    code = run.trainer_ended()
    if code is not None:
        run.note_end(code)
        run.resume()
    lifted = time.monotonic()
    if not run.wait_steps(2):
        run.flaws.append(f"{fault}: no two steps within {run.setting.recover_s:g} s after it")
    said = run.sentences[sentences:]
    end = "one sentence" if said else "goes on"  # a killed trainer once it is resumed
    return {
        "number": fault.number, "kind": fault.kind, "names": fault.names, "seconds": fault.seconds, "end": end,
        "sentences": said, "back_s": round(time.monotonic() - lifted, 1), "took_s": round(time.monotonic() - began, 1),
    }  # fmt: skip


def finish(run: Run) -> None:
    """SIGTERM to the trainer, which has to save, and then its last three steps."""
    process = run.trainer.process
    assert process is not None
    process.terminate()
    try:
        code = process.wait(60 * _busy())
    except subprocess.TimeoutExpired:
        run.flaws.append("the trainer did not end within 60 s of SIGTERM")
        process.kill()
        code = process.wait()
    if code != 128 + signal.SIGTERM or "resume with: " not in run.trainer.text()[-3000:]:
        run.flaws.append(f"the trainer ended with {code} after SIGTERM: {run.trainer.text()[-800:]}")
    steps = run.steps_done() + 3
    run.trainer.start("--resume", f"--set=run.steps={steps}")
    process = run.trainer.process
    assert process is not None
    try:
        code = process.wait(run.setting.recover_s * _busy())
    except subprocess.TimeoutExpired:
        code = None
    if code != 0 or state(run.run_dir)["status"] != "finished":
        run.flaws.append(f"the run did not finish ({code}): {run.trainer.text()[-1500:]}")


def trial(setting: Setting, faults: Sequence[Fault], *, seed: int, root: Path) -> dict[str, Any]:
    """One run with these faults; what came of it."""
    began, draws = time.monotonic(), random.Random(f"{seed} {faults[0].number}")
    clocks = clock_library(root / "clock") if any(fault.kind == "clock" for fault in faults) else None
    networks, disks = "network" in setting.kinds, "disk" in setting.kinds
    with places(root, networks=networks, disks=disks) as at:
        run = Run(at, setting, clocks=clocks)
        endured: list[dict[str, Any]] = []
        try:
            run.start()
            if not run.wait_started():
                run.flaws.append("the run did not start")
            for fault in faults:
                if run.flaws:  # nothing can be said of what comes after
                    break
                time.sleep(draws.uniform(0, 1.5))
                endured.append(endure(run, fault, draws))
                last = endured[-1]
                say(f"  {fault} -> {last['end']} ({last['took_s']} s) {' '.join(last['sentences'])}")
            if not run.flaws:
                finish(run)
        finally:
            run.stop()
            left = _left(run)
            kept = _keep_logs(run)
        found = {"seed": seed, "engine": setting.engine, "bridge": setting.bridge, "device": setting.device}
        found |= {"faults": endured, "seconds": round(time.monotonic() - began), "left": left, "flaws": run.flaws}
        found |= _counts(run) | {"logs": kept}
        return found


def _left(run: Run) -> int:
    end = time.monotonic() + 5.0
    while (found := run.left()) and time.monotonic() < end:
        time.sleep(0.2)
    for process in found:
        run.flaws.append(f"left behind: {' '.join(process.cmdline())[:200]}")
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return len(found)


def _keep_logs(run: Run) -> str:
    """Tracebacks are flaws, but those of vLLM itself, which comes to an end with a sentence of ours.

    Where there are flaws, the logs are kept and the place is told.
    """
    for name, member in run.members.items():
        theirs = name.startswith("engine") and run.setting.is_vllm(int(name[-1]) - 1)
        if _TRACEBACK in (text := member.text()) and not theirs:
            run.flaws.append(f"{member.name} wrote a traceback: {text[text.index(_TRACEBACK) :][:1500]}")
    if not run.flaws:
        return ""
    place = Path(tempfile.mkdtemp(prefix="chaos-logs-"))
    for member in run.members.values():
        if member.log.exists():
            shutil.copy(member.log, place)
    return str(place)


def _counts(run: Run) -> dict[str, Any]:
    """What is on the tape and in the metrics, against one batch a step."""
    if not (run.run_dir / "metrics.jsonl").is_file():
        return {"steps": 0, "lost": 0, "doubled": 0, "gaps": 0}
    times = Counter(trained_ids(run.run_dir))
    batches = {int(one.partition("-")[0]) for one in times}
    done = [line.step for line in metrics(run.run_dir).steps]
    steps = max(done, default=0)
    lost = steps * BATCH // GROUP - len(times) + len(set(range(max(batches, default=-1) + 1)) - batches)
    doubled = sum(count - 1 for count in times.values())
    gaps = len(set(range(1, steps + 1)) ^ set(done)) + len(done) - len(set(done))
    if lost or doubled or gaps:
        run.flaws.append(f"{lost} lost, {doubled} trained on twice, {gaps} gaps")
    return {"steps": steps, "lost": lost, "doubled": doubled, "gaps": gaps}


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def read(paths: Sequence[Path]) -> list[dict[str, Any]]:
    return [json.loads(line) for path in paths if path.is_file() for line in path.read_text().splitlines()]


def table(runs: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each kind of fault."""
    rows: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = defaultdict(list)
    for run in runs:
        for fault in run["faults"]:
            rows[fault["kind"]].append((fault, run))
    lines = [
        "| fault | times | of two | with vLLM | went on | one sentence | back (most) |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in [kind for kind in KINDS if kind in rows]:
        found = rows[kind]
        ends = Counter(fault["end"] for fault, _ in found)
        pairs = sum(len(fault["names"]) > 1 for fault, _ in found)
        vllm = sum(run["engine"] != "embedded" for _, run in found)
        back = sorted(fault["back_s"] for fault, _ in found)
        lines.append(
            f"| {kind} | {len(found)} | {pairs} | {vllm} | {ends['goes on']} | {ends['one sentence']} | "
            f"{back[len(back) // 2]:.0f} s ({back[-1]:.0f}) |"
        )
    sums = {key: sum(run[key] for run in runs) for key in ("lost", "doubled", "gaps", "left", "steps")}
    targets = {tuple(fault["names"]) for run in runs for fault in run["faults"] if fault["kind"] in ("kill", "stop")}
    count = sum(len(run["faults"]) for run in runs)
    lost = (
        f"lost: {sums['lost']}, trained on twice: {sums['doubled']}, gaps: {sums['gaps']}, left behind: {sums['left']}"
    )
    lines.append(
        f"\n{count} faults in {len(runs)} runs, {sums['steps']} steps; killed or stopped were {len(targets)} of the "
        f"{len(TARGETS)} processes and pairs; {lost}; runs with a flaw: {sum(bool(run['flaws']) for run in runs)}."
    )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("chaos.jsonl"))
    parser.add_argument("--engine", choices=ENGINES, default="embedded")
    parser.add_argument("--device", default="cpu", help="of the embedded engines")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--each", type=int, default=10, help="faults of one run")
    parser.add_argument("--forked", action="store_true", help="fork what has imported all: faster, but no clocks")
    parser.add_argument("--minutes", type=float, default=1e9, help="no run begins after that")
    parser.add_argument("--table", type=Path, nargs="*")
    args = parser.parse_args()
    # Shells have what runs in the background ignore SIGINT, and by SIGTERM Python ends with nothing put away.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    if args.table:
        say("\n".join(table(read(args.table))))
        return
    forked = {"clock"} if args.forked else set[str]()  # a library is preloaded when a program begins
    kinds = tuple(kind for kind in possible_kinds() if kind in args.kinds and kind not in forked)
    say(f"faults: {', '.join(kinds)}")
    end = time.monotonic() + 60 * args.minutes
    done = {run["first"] for run in read([args.out]) if run["seed"] == args.seed and run["engine"] == args.engine}
    well = True
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory) / "model", **HEADS)
        for first in range(0, args.faults, args.each):
            if first in done or time.monotonic() > end:
                continue
            # In a broadcast all engines take the weights by one set of names.
            bridges = BRIDGES[:-1] if args.engine == "mixed" else BRIDGES
            bridge = bridges[first // args.each % len(bridges)]
            setting = Setting(model, args.engine, bridge, args.device, kinds, args.forked)
            numbers = range(first, min(first + args.each, args.faults))
            faults = [draw(number, seed=args.seed, kinds=kinds) for number in numbers]
            found = trial(setting, faults, seed=args.seed, root=Path(directory) / f"run{first}") | {"first": first}
            with args.out.open("a") as out:
                out.write(f"{json.dumps(found)}\n")
            say(f"run of faults {first} to {numbers[-1]}, {bridge}: {found['flaws'] or 'right'} ({found['seconds']} s)")
            well = well and not found["flaws"]
    sys.exit(not well)


if __name__ == "__main__":
    main()
