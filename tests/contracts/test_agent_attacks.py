"""Agents that attack what is around them: other rollouts, the trainer, the machine, and their own reward."""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

import lachesis
from lachesis.common.types import Prompt, SamplingParams
from lachesis.config.schema import AgentSourceConfig
from lachesis.plugins.environments.agents.build import cell_of
from lachesis.plugins.environments.agents.process import AgentCommand, AgentExit, read_state, run_agent
from lachesis.plugins.environments.agents.proxy import AgentProxy
from lachesis.plugins.environments.agents.rewards import file_tests
from lachesis.plugins.environments.agents.session import AgentSession, Recorder
from lachesis.plugins.sandbox import cell as walls
from lachesis.plugins.sandbox.cell import Cell, CellRunner
from lachesis.plugins.sandbox.escapes import try_escapes
from lachesis.plugins.sandbox.local import LocalSandbox
from lachesis.plugins.sandbox.records import FunctionTests, Limits, Program, SandboxError, Verdict
from lachesis.rollouts.call_batcher import CallBatcher
from lachesis.rollouts.rewards.functions import Excluded
from lachesis.rollouts.tools.parsers import hermes
from tests.contracts.agent_attacks import ATTACKS, BEYOND, LEFTOVERS, PRELUDE
from tests.fakes import FakeEngine
from tests.threads import listening
from tests.tiny import tiny_tokenizer
from tests.walls import needs_namespaces

pytestmark = needs_namespaces
TASK = Prompt(id="1", token_ids=(3,), text="do it", columns={"prompt": "do it", "answer": "4711", "tests": ["a"]})
WAITS = f"{PRELUDE}\nopen('mine.txt', 'w').write('untouched')\nprint('ready', flush=True)\ntime.sleep(600)"


@dataclass
class World:
    """What an agent may want: another's session and process, a server, and secrets of the user."""

    proxy: AgentProxy
    victim: AgentSession
    known: dict[str, Any]
    workdir: Path

    def play(self, program: str, **fields: Any) -> tuple[AgentExit, AgentSession]:
        """One rollout of a program that attacks."""
        (self.workdir / "known.json").write_text(json.dumps(self.known))
        key, session = self.proxy.open(seed=2, params=SamplingParams(max_tokens=5))
        limits = fields.pop("limits", {})
        try:
            ended = run_agent(
                AgentCommand(
                    (sys.executable, "-c", PRELUDE + program),
                    self.workdir,
                    {},
                    20.0,
                    cell=Cell("", 8000, **limits),
                    **fields,
                ),
                TASK,
                url=self.proxy.url,
                key=key,
                listen=lambda listener: self.proxy.listen(key, listener),
                stop=lambda: False,
            )
        finally:
            self.proxy.close(key)
        return ended, session


class _Server(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"of the user")

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    tokenizer: Any = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    engine = FakeEngine(lambda request, index: tokenizer("hello<eos>")["input_ids"])
    recorder = Recorder(tokenizer, parse=hermes, template_kwargs={}, max_context=1000)
    proxy = AgentProxy(CallBatcher(engine, at_once=1), recorder)
    with listening(proxy):
        yield from _world(proxy, tmp_path_factory)


def _world(proxy: AgentProxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    outside, workdir, secret = (
        tmp_path_factory.mktemp("outside"),
        tmp_path_factory.mktemp("work"),
        secrets.token_hex(16),
    )
    (outside / "secret.txt").write_text(secret)
    (outside / "tasks.jsonl").write_text(json.dumps(TASK.columns))
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    abstract = f"bait-{secrets.token_hex(4)}"
    listeners = [socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
    listeners[0].bind(f"\0{abstract}")
    os.chdir(outside)
    listeners[1].bind("door")
    for listener in listeners:
        listener.listen()
    os.environ["LACHESIS_BAIT"] = secret
    key, victim = proxy.open(seed=1, params=SamplingParams(max_tokens=5))
    over = threading.Event()
    started = {process.pid for process in psutil.Process().children(recursive=True)}
    other = threading.Thread(
        target=run_agent,
        args=(AgentCommand((sys.executable, "-c", WAITS), workdir, {}, 600.0, cell=Cell("", 8000)), TASK),
        kwargs={"url": proxy.url, "key": key, "listen": lambda one: proxy.listen(key, one), "stop": over.is_set},
    )  # fmt: skip
    (workdir / "known.json").write_text("{}")
    other.start()
    box = _until(lambda: next(iter(Path("/tmp").glob("lachesis-agent-*/box/work/mine.txt")), None)).parents[2]
    running = [one for one in psutil.Process().children(recursive=True) if one.pid not in started]
    known = {
        "key": key,
        "secret": secret,
        "pid": os.getpid(),
        "victim": running[-1].pid,
        "proxy": proxy.url,
        "server": f"http://127.0.0.1:{server.server_port}",
        "ports": [server.server_port, int(proxy.url.rsplit(":", 1)[1]), 22, 80],
        "abstract": abstract,
        "socket": str(outside / "door"),
        "file": str(outside / "secret.txt"),
        "answers": str(outside / "tasks.jsonl"),
        "other": str(box),
        "home": str(Path.home()),
        "package": str(Path(lachesis.__file__).parent),
        "root": os.geteuid() == 0,
    }
    yield World(proxy, victim, known, workdir)
    assert running[-1].is_running() and (box / "box/work/mine.txt").read_text() == "untouched"
    assert not victim.trajectories and victim.begun == 0, "nothing was recorded under its key"
    over.set()
    other.join()
    del os.environ["LACHESIS_BAIT"]
    server.shutdown()
    for listener in listeners:
        listener.close()


def _until(found: Any) -> Any:
    for _ in range(400):
        if (value := found()) is not None:
            return value
        time.sleep(0.05)
    raise AssertionError("the other agent does not start")


# Several in one process each: the wall is the same, and starting costs more than they do.
@pytest.mark.parametrize("name", ATTACKS)
def test_no_agent_gets_anything(world: World, name: str):
    ended, session = world.play(f"{ATTACKS[name]}\nprint('tried all')")
    assert "tried all" in ended.output and "OUT:" not in ended.output, ended.output
    assert world.known["secret"] not in ended.output and not session.trajectories
    assert not world.victim.trajectories and world.victim.begun == 0
    assert "reward" not in ended.files and ended.reward is None


def test_an_honest_agent_asks_under_its_own_key(world: World):
    program = "ask(os.environ['OPENAI_API_KEY'])\nopen('kept.txt', 'w').write('done')\nprint('asked')"
    ended, session = world.play(program, keep_files=("*.txt",))
    assert (ended.exit_code, ended.output.strip(), ended.beyond) == (0, "asked", "")
    assert session.turns == 1 and ended.files == {"kept.txt": "done"}


@pytest.mark.parametrize("name", LEFTOVERS)
def test_what_an_agent_leaves_leads_nowhere(world: World, name: str, monkeypatch: pytest.MonkeyPatch):
    made: list[Path] = []

    def make(*args: Any, **kwargs: Any) -> str:
        made.append(Path(real_make(*args, **kwargs)))
        return str(made[-1])

    real_make = tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", make)
    started = time.monotonic()
    ended, _ = world.play(f"{LEFTOVERS[name]}", keep_files=("*.txt", "*/*.txt"), limits={"disk_bytes": 600 << 20})
    assert time.monotonic() - started < 15
    assert ended.exit_code == 0 and not ended.timed_out, ended.output
    assert world.known["secret"] not in json.dumps(dict(ended.files)) and "root:" not in str(ended.files)
    assert "late" not in ended.files.values() and sum(map(len, ended.files.values())) < 100
    own = [path for path in made if path.name.startswith("lachesis-agent-")]
    assert own and not any(path.exists() for path in own), "its directory is removed"
    honest, session = world.play("ask(os.environ['OPENAI_API_KEY'])")
    assert honest.exit_code == 0 and session.turns == 1, "the proxy answers others"


@pytest.mark.parametrize("name", BEYOND)
def test_an_agent_beyond_a_limit_is_ended(world: World, name: str):
    why, program = BEYOND[name]
    memory = 2 << 30 if name == "processes" else 256 << 20
    ended, _ = world.play(program, limits={"memory_bytes": memory, "disk_bytes": 32 << 20, "processes": 64})
    assert "OUT:" not in ended.output and not ended.timed_out
    assert ended.beyond == ("" if why == "exited" else why), ended.output


def test_its_wall_holds_the_escapes_that_doctor_tries():
    assert [attempt for attempt in try_escapes(CellRunner()) if not attempt.held] == []


def test_the_programs_and_files_of_its_command_are_seen_wherever_they_are(world: World, tmp_path: Path):
    """In a directory that is seen already, in /tmp, behind a link of the system's, and by a link to elsewhere."""
    (tmp_path / "real").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "real").chmod(0o755)
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    for command in ([sys.executable, "-c", "print('ran')"], ["/bin/sh", "-c", "echo ran"], [str(tmp_path / "linked")],
                    ["sh", str(tmp_path / "real")]):  # fmt: skip
        cell = cell_of(AgentSourceConfig(command=command))
        outcome = CellRunner(readable=cell.readable).run(Program(argv=tuple(command), limits=Limits(wall_s=20)))
        assert outcome.stdout == b"ran\n", outcome


def test_without_a_wall_it_says_so_and_stops(world: World, monkeypatch: pytest.MonkeyPatch):
    refused = walls._MAIN.replace("main()", "import lachesis.plugins.sandbox.kernel as k; k.unshare = lambda f: "
                                  "(_ for _ in ()).throw(OSError(1, 'Operation not permitted')); main()")  # fmt: skip
    monkeypatch.setattr(walls, "_MAIN", refused)
    with pytest.raises(SandboxError, match=r"no wall can be put up .*not permitted.*"):
        world.play("print('ran')")


def test_files_are_judged_by_us_whatever_they_do(world: World):
    tests = ["assert add(2, 3) == 5", "assert add(0, 0) == 0"]
    left = {
        "right": "def add(a, b): return a + b",
        "exits": "import os\nos._exit(0)",
        "equals all": "class A:\n    def __eq__(s, o): return True\ndef add(a, b): return A()",
    }
    files = [{"solution.py": code} for code in left.values()] + [{}]
    assert file_tests([[]] * 4, files, [tests] * 4) == [1.0, 0.0, 0.0, 0.0]


def test_a_rollout_whose_sandbox_fails_is_excluded_and_the_others_are_judged(monkeypatch: pytest.MonkeyPatch):
    judged = LocalSandbox.test

    def failing(self: LocalSandbox, tests: FunctionTests) -> list[Verdict]:
        if "fails" in tests.code:
            raise SandboxError("the sandbox ended twice")
        return judged(self, tests)

    monkeypatch.setattr(LocalSandbox, "test", failing)
    files = [{"solution.py": "fails = 1"}, {"solution.py": "def f(): return 1"}]
    excluded, right = file_tests([[]] * 2, files, [["assert f() == 1"]] * 2)
    assert isinstance(excluded, Excluded)
    assert right == 1.0


def test_files_are_bounded_in_all(tmp_path: Path):
    for number in range(8):
        (tmp_path / f"{number}.txt").write_bytes(bytes([97]) * (1 << 20))
    assert list(read_state(tmp_path, ("*.txt",))) == ["0.txt", "1.txt", "2.txt", "3.txt"]
    assert read_state(tmp_path, ()) == {}
