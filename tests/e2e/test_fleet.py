"""A run over three engines, of which one is killed, one is stopped, and one does not get the weights for a while."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from lachesis.bridges import saved
from lachesis.bridges.external import ExternalBridge, OwnedEngine
from lachesis.bridges.saved import load_checkpoint
from lachesis.common.deadline import Deadline
from lachesis.common.files import write_atomic
from lachesis.config.schema import EmbeddedServerConfig, LachesisConfig
from lachesis.engines import build as engine_build
from lachesis.engines.fleet import Fleet, State, Ticket
from lachesis.engines.http import dispatch
from lachesis.engines.http.control import ServerControl
from lachesis.transport.channel import Channel, Sent
from tests import warm
from tests.e2e.runs import change, environment, metrics, run_here, tape, write_run
from tests.ports import free_port
from tests.waiting import LONG_S, until

STEPS = 60
SECTIONS: dict[str, dict[str, Any]] = {
    "run": {"steps": STEPS},
    "batch": {"prompts_per_step": 6},
    "checkpoint": {"save_final": False},
}

# What is told of an engine that is stopped amid a transfer, in this order, and within which time it begins.
TOLD = ("is stopped by a signal", "the others continue")
TOLD_S = 5.0


class Engine:
    """A server, which may be started again at its address."""

    def __init__(self, directory: Path, *, sessions: Path) -> None:
        self._directory = directory
        self._sessions = sessions
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.starts = 0
        self.start()

    def start(self) -> None:
        command = [
            sys.executable, "-m", "lachesis", "serve", "--engine", "embedded", "--device", "cpu",
            "--model", str(self._directory / "model"), "--port", str(self.port),
            "--adapter-root", str(self._directory),
        ]  # fmt: skip
        self.starts += 1
        with (self._directory / f"engine-{self.port}.log").open("ab") as log:
            self.process: subprocess.Popen[Any] = warm.Popen(
                command, env=environment(LACHESIS_SESSION_DIR=str(self._sessions)), stdout=log, stderr=log
            )

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.send(signal.SIGKILL)
        self.process.wait(LONG_S)


@contextmanager
def engines(directory: Path, *, sessions: Path, number: int = 3) -> Iterator[list[Engine]]:
    started = [Engine(directory, sessions=sessions) for _ in range(number)]
    try:
        yield started
    finally:
        for engine in started:
            engine.end()


class Journal:
    """What happened to the run's fleet, in order, as ``(what, url, session)``."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.entries: list[tuple[str, str, str]] = []
        for name in ("died", "unproved"):
            self._note(patch, name)
        assemble = ExternalBridge._assemble

        def noting_assembly(bridge: ExternalBridge[Any]) -> None:
            self.entries.append(("transfer", "", ""))
            assemble(bridge)

        patch.setattr(ExternalBridge, "_assemble", noting_assembly)
        pick, proved = Fleet.pick, Fleet.proved

        def noting_pick(fleet: Fleet, **request: Any) -> Ticket | None:
            with fleet._lock:  # so that the order is that of the calls
                ticket = pick(fleet, **request)
                if ticket is not None:
                    self.entries.append(("picked", ticket.url, ticket.session))
            return ticket

        def noting_proof(fleet: Fleet, url: str, session: str, version: int) -> None:
            with fleet._lock:
                proved(fleet, url, session, version)
                self.entries.append(("proved", url, session))

        patch.setattr(Fleet, "pick", noting_pick)
        patch.setattr(Fleet, "proved", noting_proof)

    def _note(self, patch: pytest.MonkeyPatch, name: str) -> None:
        call = getattr(Fleet, name)

        def noting(fleet: Fleet, url: str, reason: str) -> None:
            with fleet._lock:
                if fleet.state(url) is not State.DEAD:
                    self.entries.append((name, url, fleet.session(url)))
                call(fleet, url, reason)

        patch.setattr(Fleet, name, noting)

    def note_answer(self, url: str) -> None:
        """Once the server at an address answers, whatever the run knows of it."""
        until(lambda: answers(url), f"{url} does not answer")
        self.entries.append(("answers", url, ""))

    def until_second_transfer(self, url: str) -> list[tuple[str, str, str]]:
        """What happened before the second transfer that began after a server answered."""
        answered = self.entries.index(("answers", url, ""))
        begun = [number for number, (what, *_) in enumerate(self.entries) if what == "transfer" and number > answered]
        return self.entries[: begun[1]]

    def of(self, engine: Engine) -> list[tuple[str, str]]:
        return [(what, session) for what, url, session in self.entries if url == engine.url]


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=LONG_S).is_success
    except httpx.TransportError:
        return False


def groups(run_dir: Path) -> dict[str, list[tuple[str, list[tuple[str, float]]]]]:
    """Which groups were trained in each step, and of what: an engine's answer depends on weights and seed alone."""
    return {
        name: [
            (line["prompt"]["id"], [(sample["text"], sample["reward"]) for sample in line["samples"]])
            for line in map(json.loads, text.splitlines())
        ]
        for name, text in tape(run_dir).items()
    }


class Disturbance:
    """Does things to engines as the run comes to certain steps."""

    def __init__(self, run_dir: Path, plan: dict[int, Callable[[], None]]) -> None:
        self._run_dir, self._plan = run_dir, plan
        self.failed: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for step, action in sorted(self._plan.items()):
                until(lambda step=step: self._step() >= step, f"step {step} was not reached", limit_s=4 * LONG_S)
                action()
        except BaseException as error:
            self.failed.append(error)

    def _step(self) -> int:
        path = self._run_dir / "metrics.jsonl"
        return path.read_text().count('"type": "step"') if path.is_file() else 0

    def join(self) -> None:
        self._thread.join(LONG_S)
        assert not self.failed and not self._thread.is_alive()


@pytest.mark.long(
    "test_one_of_two_is_stopped_amid_a_transfer_and_serves_again_once_it_is_proved: with the faults of "
    "test_one_of_two_of_the_runs_own_is_killed_amid_a_transfer_and_replaced and of the bridges' contract besides"
)
@pytest.mark.timeout(600)
def test_one_of_three_is_killed_one_stopped_and_one_stale_and_no_group_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(dispatch, "_LOOK_S", 0.1)
    straight = run_here(write_run(tmp_path / "straight", **SECTIONS))
    sessions = tmp_path / "sessions"
    monkeypatch.setenv("LACHESIS_SESSION_DIR", str(sessions))
    directory = tmp_path / "fleet"
    config = write_run(directory, **SECTIONS)
    journal = Journal(monkeypatch)
    with engines(directory, sessions=sessions) as (killed, stopped, stale), ThreadPoolExecutor(1) as beside:
        engine = {
            "engine": {"kind": "http", "urls": [killed.url, stopped.url, stale.url], "wait_s": LONG_S},
            "bridge": {"kind": "reload"},
            "deadlines": {"progress_s": 2.0},
        }
        change(config, **engine)
        missing: set[str] = set()
        noted: list[Future[None]] = []

        def load(server: ServerControl, path: Path, version: int, deadline: Deadline) -> None:
            """One engine is told the version and does not get the weights."""
            if server.url in missing:
                server.set_version(version, deadline=deadline)
            else:
                load_checkpoint(server, path, version, deadline)

        monkeypatch.setattr(saved, "load_checkpoint", load)
        at = sorted(random.Random(7).sample(range(3, 50, 5), 4))
        disturbance = Disturbance(
            directory / "runs/proof",
            {
                at[0]: lambda: (
                    killed.end(),
                    killed.start(),
                    noted.append(beside.submit(journal.note_answer, killed.url)),
                ),
                at[1]: lambda: missing.add(stale.url),
                at[2]: lambda: (missing.clear(), stopped.send(signal.SIGSTOP)),
                at[3]: lambda: stopped.send(signal.SIGCONT),
            },
        )
        found = run_here(config)
        disturbance.join()
        noted[0].result()
    assert found.steps == STEPS
    assert groups(found.run_dir) == groups(straight.run_dir), "the same groups, none lost and none twice"

    at_work = {
        name for line in metrics(found.run_dir).steps for name in line.values if name.startswith("generation_time/")
    }
    assert at_work == {f"generation_time/{urlsplit(engine.url).netloc}" for engine in (killed, stopped, stale)}

    assert [engine.starts for engine in (killed, stopped, stale)] == [2, 1, 1]
    assert len({session for _, session in journal.of(stopped)}) == len({s for _, s in journal.of(stale)}) == 1
    before, after = sorted({s for what, s in journal.of(killed) if what == "picked"}, key=_place(journal.of(killed)))
    assert journal.of(killed).index(("proved", after)) < journal.of(killed).index(("picked", after))
    assert ("picked", killed.url, after) in journal.until_second_transfer(killed.url), "it serves as soon as it can"
    assert ("died", before) in journal.of(killed)
    assert "died" in [what for what, _ in journal.of(stopped)]
    _check_admitted(journal.of(stale), out="unproved")
    _check_admitted(journal.of(stopped), out="died")


def test_one_of_two_is_stopped_amid_a_transfer_and_serves_again_once_it_is_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    steps, stopped_in = 10, 4
    sections = SECTIONS | {"run": {"steps": steps}}
    straight = run_here(write_run(tmp_path / "straight", **sections))
    sessions = tmp_path / "sessions"
    monkeypatch.setenv("LACHESIS_SESSION_DIR", str(sessions))
    directory = tmp_path / "fleet"
    config, journal = write_run(directory, **sections), Journal(monkeypatch)
    stopped_at: list[float] = []
    with engines(directory, sessions=sessions, number=2) as (steady, stopped):
        urls = [steady.url, stopped.url]
        change(config, engine={"kind": "http", "urls": urls, "wait_s": LONG_S}, bridge={"kind": "reload"})

        def load(server: ServerControl, path: Path, version: int, deadline: Deadline) -> None:
            if (server.url, version) == (stopped.url, stopped_in):
                stopped.send(signal.SIGSTOP)
                stopped_at.append(time.time())
            load_checkpoint(server, path, version, deadline)

        monkeypatch.setattr(saved, "load_checkpoint", load)
        disturbance = Disturbance(directory / "runs/proof", {stopped_in + 1: lambda: stopped.send(signal.SIGCONT)})
        found = run_here(config)
        disturbance.join()
    assert groups(found.run_dir) == groups(straight.run_dir), "the same groups, none lost and none twice"
    assert [line.values["weight_version"] for line in metrics(found.run_dir).steps] == [*range(1, steps + 1)]
    _check_admitted(journal.of(stopped), out="died")
    assert "died" not in [what for what, _ in journal.of(steady)]

    told = {name: record.created for record in caplog.records for name in TOLD if name in record.getMessage()}
    assert list(told) == [*TOLD]
    assert told[TOLD[0]] - stopped_at[0] < TOLD_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def test_an_engine_joins_a_run_and_another_leaves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sections = SECTIONS | {"run": {"steps": 20}}
    straight = run_here(write_run(tmp_path / "straight", **sections))
    sessions = tmp_path / "sessions"
    monkeypatch.setenv("LACHESIS_SESSION_DIR", str(sessions))
    directory, servers = tmp_path / "fleet", tmp_path / "servers.txt"
    config = write_run(directory, **sections)
    journal = Journal(monkeypatch)
    with engines(directory, sessions=sessions, number=2) as (first, second):
        change(
            config,
            engine={"kind": "http", "urls": [f"file:{servers}"], "wait_s": LONG_S},
            bridge={"kind": "reload"},
        )
        write_atomic(servers, f"{first.url}\n")
        disturbance = Disturbance(
            directory / "runs/proof",
            {
                3: lambda: write_atomic(servers, f"{first.url}\n{second.url}\n"),
                10: lambda: write_atomic(servers, f"{second.url}\n"),
            },
        )
        found = run_here(config)
        disturbance.join()
        left = ServerControl(first.url)
        assert left.info(deadline=Deadline("the engine that left", LONG_S)).owner is None, "another run may have it"
        left.close()
    assert groups(found.run_dir) == groups(straight.run_dir)
    joined = [what for what, _ in journal.of(second)]
    assert joined.index("proved") < joined.index("picked")
    picked = [url for what, url, _ in journal.entries if what == "picked"]
    assert first.url in picked and first.url not in picked[-6:], "it got no more requests"


def embedded_command(
    config: LachesisConfig, number: int, checkpoint: Path | None = None, *, directory: Path
) -> Sequence[str]:
    """The embedded server in the place of vLLM, of which alone a run starts several."""
    assert config.engine.kind == "vllm"
    stands_in = EmbeddedServerConfig(host=config.engine.host, port=config.engine.port)
    options = engine_build.server_options(config, stands_in, directory=directory, number=number, checkpoint=checkpoint)
    return [sys.executable, "-m", "lachesis", "serve", *options.command_line()]


def test_one_of_two_of_the_runs_own_is_killed_amid_a_transfer_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of `broadcast`, while the tensors are on their way: the other one has them in the same step."""
    steps, killed_in, waits_in = 16, 5, 9
    sections = SECTIONS | {"run": {"steps": steps}}
    straight = run_here(write_run(tmp_path / "straight", **sections))
    sessions = tmp_path / "sessions"
    monkeypatch.setenv("LACHESIS_SESSION_DIR", str(sessions))
    monkeypatch.setattr(engine_build, "server_command", embedded_command)
    warm.fork_servers(monkeypatch.setattr)
    journal, port = Journal(monkeypatch), free_port_before_another()
    survivor, lost = (f"http://127.0.0.1:{port + number}" for number in range(2))
    pids: list[tuple[int, int]] = []
    replaced = threading.Event()
    send, replace = Channel.send, OwnedEngine._replace

    def noting_replacement(owned: OwnedEngine, process: Any) -> None:
        replace(owned, process)
        replaced.set()

    def dying(tensors: Iterable[Any]) -> Iterator[Any]:
        for number, tensor in enumerate(tensors):
            if number == 1:
                os.kill(pids[-1][1], signal.SIGKILL)
            yield tensor

    def sending(channel: Channel, tensors: Iterable[Any], *arguments: Any, **options: Any) -> Sent:
        pids.append((pid_of(sessions, survivor), pid_of(sessions, lost)))
        if len(pids) == waits_in:
            assert replaced.wait(LONG_S), "it was not started again"
        return send(channel, dying(tensors) if len(pids) == killed_in else tensors, *arguments, **options)

    monkeypatch.setattr(OwnedEngine, "_replace", noting_replacement)
    monkeypatch.setattr(Channel, "send", sending)
    config = write_run(
        tmp_path / "fleet",
        **sections,
        engine={"kind": "vllm", "data_parallel_size": 2, "port": port},
        bridge={"kind": "broadcast"},
    )
    found = run_here(config)
    assert found.steps == steps
    assert groups(found.run_dir) == groups(straight.run_dir)
    assert [line.values["weight_version"] for line in metrics(found.run_dir).steps] == [*range(1, steps + 1)]

    assert len({first for first, _ in pids}) == 1, "the survivor is the process that it was"
    assert len({second for _, second in pids} - {0}) == 2
    sessions_of_lost = list(dict.fromkeys(s for what, url, s in journal.entries if (what, url) == ("picked", lost)))
    before, after = sessions_of_lost
    assert journal.entries.index(("died", lost, before)) < journal.entries.index(("proved", lost, after))
    assert journal.entries.index(("proved", lost, after)) < journal.entries.index(("picked", lost, after))
    assert len({s for what, url, s in journal.entries if (what, url) == ("picked", survivor)}) == 1
    assert not [*sessions.glob("*.json")], "both were stopped"


def pid_of(sessions: Path, url: str) -> int:
    """Of the server at an address, as its session has it; 0 where it has none."""
    path = sessions / f"{urlsplit(url).port}.json"
    return json.loads(path.read_text())["pid"] if path.exists() else 0


def free_port_before_another() -> int:
    ports = [free_port(), free_port()]
    while ports[-1] != ports[-2] + 1:
        ports.append(free_port())
    return ports[-2]


def _place(entries: list[tuple[str, str]]) -> Callable[[str], int]:
    """When a session came first."""
    return lambda session: next(index for index, entry in enumerate(entries) if entry[1] == session)


def _check_admitted(entries: list[tuple[str, str]], *, out: str) -> None:
    """Once it was out it got nothing until it was proved anew, and then it got requests again."""
    steps = [what for what, _ in entries]
    assert out in steps
    admitted, again = False, 0
    for what in steps:
        if what == out:
            admitted, again = False, 0
        elif what == "proved":
            admitted = True
        elif what == "picked":
            assert admitted, "it got a request that it had no proof for"
            again += 1
    assert again, "it serves again"
