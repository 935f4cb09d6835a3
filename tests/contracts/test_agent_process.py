"""An agent's process: what it is told, what becomes of it, and that a rollout that failed is none."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lachesis.common.deadline import Deadline
from lachesis.common.errors import ConfigError, EngineError
from lachesis.common.types import Prompt, SamplingParams
from lachesis.config.schema import AgentSourceConfig
from lachesis.plugins.environments.agents.build import agent_of
from lachesis.plugins.environments.agents.container import Container, container_of
from lachesis.plugins.environments.agents.player import AgentPlayers
from lachesis.plugins.environments.agents.process import AgentCommand, AgentExit, run_agent
from lachesis.plugins.environments.agents.proxy import AgentProxy
from lachesis.plugins.environments.agents.session import Recorder
from lachesis.rollouts.call_batcher import CallBatcher
from lachesis.rollouts.datasets import PromptStream
from lachesis.rollouts.episodes import Episodes, EpisodeSource, item_of
from lachesis.rollouts.generation import text_decoder
from lachesis.rollouts.rewards.rewarder import NamedReward, Rewarder
from lachesis.rollouts.tools.parsers import hermes
from tests.fakes import FakeEngine
from tests.tiny import tiny_tokenizer

PROMPT = Prompt(id="7", token_ids=(3,), text="do it", columns={"prompt": "do it", "level": 2})
ASK = """
import json, os, sys, urllib.request
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": "m", "messages": [{"role": "user", "content": sys.argv[1]}]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
"""


def command(program: str, *arguments: str, **fields: Any) -> AgentCommand:
    options: dict[str, Any] = {"workdir": None, "env": {}, "timeout_s": 20.0} | fields
    return AgentCommand((sys.executable, "-c", program, *arguments), **options)


def run(agent: AgentCommand) -> AgentExit:
    return run_agent(
        agent,
        PROMPT,
        url="http://127.0.0.1:1",
        key="sk-1",
        listen=lambda listener: listener.close(),
        stop=lambda: False,
    )


def test_it_knows_its_task_its_endpoint_and_where_its_reward_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "of the user")
    (tmp_path / "given.txt").write_text("given")
    program = """
import json, os, sys
names = ("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "MINE")
print(json.dumps([sys.argv[1:], [os.environ.get(name) for name in names], os.listdir(".")]))
print(json.dumps(json.load(open(os.environ["LACHESIS_TASK"]))))
open("made.txt", "w")
open(os.environ["LACHESIS_REWARD"], "w").write("0.5")
sys.exit(3)
"""
    fields: dict[str, Any] = {"told": frozenset({"level"}), "self_reported": True}
    ended = run(command(program, "{prompt}", "{level}", "{else}", workdir=tmp_path, env={"MINE": "x"}, **fields))
    said, task = map(json.loads, ended.output.splitlines())
    assert said == [
        ["do it", "2", "{else}"],
        ["http://127.0.0.1:1/v1", "http://127.0.0.1:1", "sk-1", "sk-1", None, "x"],
        ["given.txt"],
    ]
    assert task == {"id": "7", "prompt": "do it", "level": 2, "messages": []}
    assert (ended.exit_code, ended.timed_out, ended.reward) == (3, False, "0.5")
    assert os.listdir(tmp_path) == ["given.txt"], "it ran in a copy"


def test_it_is_no_rank_of_the_run(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "1")
    program = "import os; print([name for name in os.environ if name.startswith(('RANK', 'MASTER', 'TORCHELASTIC'))])"
    assert run(command(program)).output.strip() == "[]"


def test_it_has_none_of_the_trainers_variables_but_those_it_is_given(monkeypatch: pytest.MonkeyPatch):
    for name in ("WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "MINE"):
        monkeypatch.setenv(name, "of the user")
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    found = json.loads(run(command(program)).output)
    assert "of the user" not in found.values() and found["PATH"] == os.environ["PATH"]
    assert not {name for name in found if name.startswith(("XDG", "PYTEST", "LACHESIS"))} - {
        "LACHESIS_TASK", "LACHESIS_MODEL"
    }  # fmt: skip
    assert found["HOME"] == found["PWD"] and found["HOME"] != os.environ.get("HOME")
    opened = json.loads(run(command(program, inherited=("MINE", "NOT_THERE"), env={"OWN": "1"})).output)
    assert (opened["MINE"], opened["OWN"], "HF_TOKEN" in opened, "NOT_THERE" in opened) == (
        "of the user", "1", False, False
    )  # fmt: skip


def test_it_is_told_the_prompt_and_what_is_named():
    program = "import json, os, sys; print(sys.argv[1:], json.load(open(os.environ['LACHESIS_TASK'])))"
    untold = command(program, "{prompt}", "{level}")
    assert run(untold).output.strip() == "['do it', '{level}'] {'id': '7', 'prompt': 'do it', 'messages': []}"


def test_a_configuration_tells_columns_of_the_command_unless_rewards_use_them():
    def told(judged_by: set[str], **keys: Any) -> frozenset[str]:
        source = AgentSourceConfig(command=[sys.executable, "{prompt}", "{level}", "{answer}"], **keys)
        return agent_of(source, judged_by=frozenset(judged_by)).told

    assert told(set()) == {"prompt", "level"}
    assert told({"level"}) == {"prompt"}
    assert told({"level"}, columns=["answer"]) == {"prompt", "answer"}


def test_columns_that_functions_name_are_known():
    def one(completions: Any, level: int, prompts: Any = None, **columns: Any) -> list[float]:
        return [0.0]

    def other(completions: Any, tests: Any = None) -> list[float]:
        return [0.0]

    rewarder = Rewarder([NamedReward("one", one), NamedReward("other", other)])
    assert rewarder.named_columns == {"level", "tests"}


def test_at_its_limit_it_ends_with_all_that_it_started(tmp_path: Path):
    pids = tmp_path / "pids"
    program = f"""
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", stubborn])
open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
time.sleep(60)
"""
    started = time.monotonic()
    ended = run(command(program, timeout_s=1.5))
    assert ended.timed_out
    assert time.monotonic() - started < 15
    for pid in map(int, pids.read_text().split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_program_that_is_not_there():
    with pytest.raises(ConfigError, match=r"source\.command: the program 'no-such-program'"):
        AgentCommand(("no-such-program",), None, {}, 1.0)


@pytest.fixture
def engine() -> FakeEngine:
    tokenizer = tiny_tokenizer()
    return FakeEngine(lambda request, index: tokenizer("hello<eos>")["input_ids"])


@pytest.fixture
def build(engine: FakeEngine) -> Iterator[Any]:
    def make(agent: AgentCommand, *, retries: int = 0, **fields: Any) -> Episodes:
        tokenizer: Any = tiny_tokenizer()
        tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
        recorder = Recorder(tokenizer, parse=hermes, template_kwargs={}, max_context=100)
        options: dict[str, Any] = {"max_concurrent": 4, "score_nonzero": False} | fields
        proxy, params = AgentProxy(CallBatcher(engine, at_once=1), recorder), SamplingParams(max_tokens=20)
        players = AgentPlayers(agent=agent, proxy=proxy, params=params, decode=text_decoder(tokenizer), **options)
        made.append(Episodes(players, max_concurrent=options["max_concurrent"], refill_rounds=retries))
        return made[-1]

    made: list[Episodes] = []

    yield make
    for one in made:
        if one._started:  # others lent their players to a source
            one.close()


def sample(episodes: Episodes, *, n: int = 4, limit_s: float = 30) -> Any:
    (played,) = episodes.play_all([PROMPT], seeds=[1], count=n, deadline=Deadline("test", limit_s))
    return item_of(PROMPT, played)


FAILING = """
kind = int(open(sys.argv[2]).read())
open(sys.argv[2], "w").write(str(kind + 1))
if kind == 0: sys.exit(3)
if kind == 1: time.sleep(60)
if kind == 2: sys.exit(0)
urllib.request.urlopen(request).read()
"""


def test_what_crashed_took_too_long_or_said_nothing_is_left_out_and_counted(build: Any, tmp_path: Path):
    (tmp_path / "count").write_text("0")
    program = f"import time{ASK}{FAILING}"
    rollouts = build(command(program, "{prompt}", str(tmp_path / "count"), timeout_s=3.0), max_concurrent=1)
    item = sample(rollouts, n=5)
    assert [sample.text for sample in item.group.samples] == ["hello", "hello"]
    counts = rollouts.counts.take()
    assert {name: count for name, count in counts.items() if "failures" in name} == {
        "rollout_failures": 3,
        "rollout_failures/crash": 1,
        "rollout_failures/timeout": 1,
        "rollout_failures/silent": 1,
    }


def test_what_failed_is_played_anew(build: Any, tmp_path: Path):
    (tmp_path / "count").write_text("2")
    program = f"import time{ASK}{FAILING}"
    rollouts = build(command(program, "{prompt}", str(tmp_path / "count")), max_concurrent=1, retries=1)
    assert len(sample(rollouts, n=2).group.samples) == 2
    assert rollouts.counts.take()["refilled_rollouts"] == 1


def test_an_exit_code_may_be_an_outcome(build: Any):
    program = f"{ASK}urllib.request.urlopen(request).read()\nsys.exit(3)"
    rollouts = build(command(program, "{prompt}", self_reported=True), score_nonzero=True)
    assert sample(rollouts, n=2).extras["exit_code"] == [3, 3]


def test_an_engine_that_fails_ends_the_call_and_its_agents(build: Any, engine: FakeEngine):
    program = f"import time{ASK}\ntry: urllib.request.urlopen(request)\nexcept Exception: time.sleep(60)"
    rollouts = build(command(program, "{prompt}"))
    engine.close()
    started = time.monotonic()
    with pytest.raises(EngineError, match="the engine is closed"):
        sample(rollouts, n=2)
    assert time.monotonic() - started < 20


def test_a_group_of_which_too_little_is_left_is_dropped(build: Any, engine: FakeEngine):
    """The crash is that of one task; the other's group is whole."""
    program = f"{ASK}urllib.request.urlopen(request).read()\nsys.exit(sys.argv[1] == 'bad')"
    rollouts = build(command(program, "{prompt}"))
    source = EpisodeSource(
        players=rollouts.players,
        stream=PromptStream(
            [Prompt(id=str(i), token_ids=(3,), text=text) for i, text in enumerate(("bad", "good"))],
            seed=0,
            shuffle=False,
        ),
        rewarder=Rewarder([NamedReward("length", lambda completions, **_: [len(one) for one in completions])]),
        num_generations=2,
        seed=0,
    )
    (group,) = source.next_groups(2, deadline=Deadline("test", 30))
    source.close()
    assert (group.prompt.text, group.rewards) == ("good", (1.0, 1.0))
    counters = source.counters()
    assert (counters["dropped_groups"], counters["rollout_failures/crash"], counters["turns"]) == (1, 2, 2)


# Stands for docker: refuses what docker refuses, runs the rest here with the variables that it was given, and says what
# it was asked to remove.
DOCKER = """#!{python}
import os, subprocess, sys
words = sys.argv[1:]
here = os.path.dirname(os.path.abspath(__file__))
if words[:2] == ["rm", "--force"] and len(words) == 3:
    open(os.path.join(here, "removed"), "a").write(words[2] + chr(10))
    sys.exit(0)
if not words or words.pop(0) != "run":
    sys.exit("docker: unknown command")
flags, env = {{}}, {{"PATH": os.environ["PATH"]}}
while words and words[0].startswith("-"):
    flag = words.pop(0)
    if flag in ("--rm", "--init"):
        continue
    if flag not in ("--name", "--network", "--user", "--volume", "--workdir", "--env") or not words:
        sys.exit(f"unknown flag: {{flag}}")
    value = words.pop(0)
    if flag == "--env":
        name, given, text = value.partition("=")
        if given or name in os.environ:
            env[name] = text if given else os.environ[name]
    elif flag in flags:
        sys.exit(f"{{flag}} twice")
    else:
        flags[flag] = value
if not words or words[0] != "some-image":
    sys.exit(125)
if not os.path.isabs(flags["--workdir"]) or not flags["--volume"].startswith("/"):
    sys.exit("paths must be absolute")
os.chdir(flags["--workdir"])
sys.exit(subprocess.run(words[1:], env=env).returncode)
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "bin"
    directory.mkdir()
    (directory / "docker").write_text(DOCKER.format(python=sys.executable))
    (directory / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(directory), prepend=os.pathsep)
    return directory


class TestContainers:
    def test_it_has_the_task_the_endpoint_and_no_variable_of_ours(self, docker: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("SECRET_KEY", "of the user")
        program = """
import json, os, sys
print(json.dumps([os.environ.get(name) for name in ("OPENAI_API_KEY", "MINE", "SECRET_KEY")]))
print(json.load(open(os.environ["LACHESIS_TASK"]))["id"], os.getcwd() == os.environ["HOME"])
open(os.environ["LACHESIS_REWARD"], "w").write("0.5")
"""
        container = container_of("docker:some-image")
        ended = run(command(program, env={"MINE": "x"}, container=container, self_reported=True))
        assert ended.output.splitlines() == ['["sk-1", "x", null]', "7 True"]
        assert (ended.exit_code, ended.timed_out, ended.reward) == (0, False, "0.5")
        assert not (docker / "removed").exists(), "it removed itself"

    def test_one_that_takes_too_long_is_removed(self, docker: Path):
        slow = command("import time; time.sleep(60)", timeout_s=1.0, container=container_of("docker:some-image"))
        assert run(slow).timed_out
        assert (docker / "removed").read_text().startswith("lachesis-agent-")

    def test_an_image_that_is_not_there_is_a_crash(self, docker: Path):
        assert run(command("", container=Container("docker", "nothing"))).exit_code == 125

    @pytest.mark.parametrize("spec", ["docker", "lxc:some-image", "docker:"])
    def test_what_is_no_container_is_refused(self, spec: str):
        with pytest.raises(ConfigError, match=r"source\.container"):
            container_of(spec)
