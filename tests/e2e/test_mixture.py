"""One run over three sources: each of them is learned, and a stopped run goes on token by token."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml

from lachesis.common.types import Completion, GenerationRequest
from lachesis.engines.base import Finished
from lachesis.engines.embedded.engine import EmbeddedEngine
from lachesis.metrics.sinks.tape import read_groups, tape_files
from lachesis.rollouts import call_batcher
from lachesis.rollouts.base import prompt_key
from tests.e2e.runs import metrics, run_here
from tests.e2e.test_agents import PLAIN
from tests.e2e.test_agents import write_run as write_agent_run
from tests.long import long_but
from tests.paths import EXAMPLES, ROOT


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, with the one whose model and tool it takes, in a directory of their own."""
    without = shutil.ignore_patterns(".cache", "__pycache__", "runs")
    directory = tmp_path_factory.mktemp("examples")
    for name in ("tools", "mixture"):
        shutil.copytree(EXAMPLES / name, directory / name, ignore=without)
    return directory / "mixture" / "config.yaml"


def drawn(run_dir: Path) -> dict[int, list[tuple[str, list[tuple[Any, Any]]]]]:
    """The prompts of each step, and the tokens of their rollouts with their logprobs."""
    return {
        step: [
            (prompt_key(one.prompt), [(sample.completion_ids, sample.logprobs) for sample in one.samples])
            for one in read_groups(file)
        ]
        for step, file in sorted(tape_files(run_dir / "rollouts").items())
    }


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch):
    """The engine completes each request alone.

    Which turns share a forward pass depends on when they arrive, and the last bits of a row's logits on the rows beside
    it: enough for another token now and then.
    """
    together = EmbeddedEngine.generate

    def one_by_one(
        engine: EmbeddedEngine, requests: Sequence[GenerationRequest], *, finished: Finished | None = None, **rest: Any
    ) -> list[list[Completion]]:
        found = [together(engine, [request], **rest)[0] for request in requests]
        for place, completions in enumerate(found):
            if finished is not None:
                finished(place, completions)
        return found

    monkeypatch.setattr(EmbeddedEngine, "generate", one_by_one)


def test_each_source_is_learned_and_told_by_its_name(example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run_dir = run_here(example).run_dir
    log = metrics(run_dir)
    # Turns that arrive at other times are sampled in other batches, so no two runs are the same.
    for name, least in {"even": 0.3, "calculator": 0.1, "high": 0.4}.items():
        rewards = [line.values[f"source/{name}/reward"] for line in log.steps]
        assert fmean(rewards[-10:]) - fmean(rewards[:10]) >= least, f"{name}: {rewards}"
    for line in log.steps:
        groups = {name: line.values[f"source/{name}/groups"] for name in ("even", "calculator", "high")}
        assert groups == {"even": 4, "calculator": 8, "high": 4}
    first, last = log.evaluations[0].by_source, log.evaluations[-1].by_source
    assert {name: result["problems"] for name, result in last.items()} == {"even": 16, "calculator": 16, "high": 8}
    assert last["even"]["accuracy"] > first["even"]["accuracy"]
    assert {"rewards/even/even/mean", "rewards/calculator/right/mean"} <= log.steps[-1].values.keys()
    names = Counter(key.partition("/")[0] for groups in drawn(run_dir).values() for key, _ in groups)
    assert names.keys() == {"even", "calculator", "high"}
    (evaluated,) = (run_dir / "evaluations").glob("*40.jsonl")
    assert {json.loads(line)["prompt"]["source"] for line in evaluated.read_text().splitlines()} == {
        "even",
        "calculator",
    }


@pytest.mark.usefixtures("alone")
def test_a_stopped_run_goes_on_token_by_token(example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    shared = ["run.steps=6", "evaluation.every_steps=0", "batch.prompts_per_step=6"]
    straight = run_here(example, *shared, "run.name=straight").run_dir
    stopped = run_here(example, *shared, "run.name=stopped", stop_after=3)
    assert not stopped.finished
    monkeypatch.setattr(call_batcher, "_GATHER_S", 0.05)  # as if turns arrived at other times
    resumed = run_here(example, *shared, "run.name=stopped", resume=True)
    assert resumed.finished
    assert drawn(resumed.run_dir) == drawn(straight)


ROLLOUTS = """
def with_length(prompts, trainer):
    rollouts = trainer.generate(prompts)
    fields = {name: [one[name] for one in rollouts] for name in ("prompt_ids", "completion_ids", "logprobs")}
    return {**fields, "length": [len(one["completion_ids"]) for one in rollouts]}

def long(completions, length, **columns):
    return [float(one) for one in length]
"""


@pytest.mark.parametrize(
    "ahead",
    long_but(
        [False, True],
        short=[True],
        why="test_agents_rollout_functions_and_datasets_share_a_run[True]: not generating ahead",
    ),
)
def test_agents_rollout_functions_and_datasets_share_a_run(tmp_path: Path, ahead: bool):
    config = write_agent_run(tmp_path, PLAIN)
    (tmp_path / "rollouts.py").write_text(ROLLOUTS)
    written = yaml.safe_load(config.read_text())
    agent = {name: written.pop(name) for name in ("source", "data", "rewards")}
    function = {
        "source": {"rollout_func": "rollouts.py:with_length"},
        "rewards": {"functions": ["rollouts.py:long"]},
        "max_completion_length": 4,
    }
    data = agent["data"]
    sources = [
        {"name": "agent", **agent},
        {"name": "function", "data": data, **function},
        {"name": "plain", "weight": 2, "data": data | {"curriculum": "pass_rate"}, "rewards": agent["rewards"]},
    ]
    pipeline = {"async_prefetch": ahead}
    changed = {"sources": sources, "pipeline": pipeline, "batch": {"prompts_per_step": 8}}
    config.write_text(yaml.safe_dump(written | changed | {"run": written["run"] | {"steps": 4 if ahead else 2}}))
    run_dir = run_here(config).run_dir
    trained = Counter[str]()
    for line in metrics(run_dir).steps:
        counts = {name: line.values.get(f"source/{name}/groups", 0.0) for name in ("agent", "function", "plain")}
        trained.update(counts)
        assert ahead or counts == {"agent": 2, "function": 2, "plain": 4}
        assert line.values.get("source/function/completion_length/max", 0.0) <= 4
        assert ahead or line.values["mean_ratio"] == pytest.approx(1.0, abs=1e-3), "trained on what was sampled"
    assert min(trained.values()) > 0, "a slow source holds up its own groups, and not for ever"


MCP_CALCULATOR = """
from mcp.server.mcpserver import MCPServer

from calculator import calculate

server = MCPServer("calculator", log_level="WARNING")
server.tool()(calculate)
server.run()
"""
# Two turns; the more digits the model says, the better. A few tasks, so that their second epoch comes soon.
SAYS_DIGITS = """
import verifiers.v1 as vf

__all__ = ["DigitsEnv", "DigitsTaskset"]


class DigitsTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def digits(self, trace: vf.Trace) -> float:
        said = "".join(message.content or "" for message in trace.assistant_messages)
        return sum(map(str.isdigit, said)) / max(len(said), 1)


class DigitsTaskset(vf.Taskset[DigitsTask, vf.TasksetConfig]):
    def load(self):
        for number in range(2, 8):
            yield DigitsTask(vf.TaskData(prompt=f"{number}*{number}"), self.config.task)


class DigitsEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class DigitsEnv(vf.Env[DigitsEnvConfig]):
    async def run(self, task: DigitsTask, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as talk:
            said = await talk.turn()
            if not said.terminated:
                await talk.turn("2*3")
"""
KINDS = ("even", "digits", "calculator")


@pytest.fixture
def of_three_kinds(example: Path) -> Path:
    """A dataset with a reward, an environment of verifiers, and a tool of an MCP server; a curriculum for each."""
    pytest.importorskip("verifiers")
    tools = example.parents[1] / "tools"
    (example.parent / "served.py").write_text(MCP_CALCULATOR)
    (example.parent / "says_digits.py").write_text(SAYS_DIGITS)
    served = {"command": [sys.executable, "served.py"], "env": {"PYTHONPATH": f"{ROOT / 'src'}:{tools}"}}
    written = yaml.safe_load(example.read_text())
    even, calculator, _ = written["sources"]
    digits = {"kind": "verifiers", "environment": "says_digits.py", "eval_tasks": 2}
    sources = [
        even,
        {"name": "digits", "weight": 2, "source": digits, "data": {}},
        calculator | {"weight": 1, "source": calculator["source"] | {"tools": [served]}},
    ]
    adapting = [one | {"data": one["data"] | {"curriculum": "pass_rate"}} for one in sources]
    config = example.with_name("three.yaml")
    config.write_text(yaml.safe_dump(written | {"sources": adapting}))
    return config


@pytest.mark.long("test_a_stopped_run_goes_on_token_by_token: with verifiers and a served tool among the sources")
@pytest.mark.usefixtures("alone")
def test_a_run_over_a_dataset_verifiers_and_an_mcp_server_is_resumed(
    of_three_kinds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    shared = ["run.steps=4", "evaluation.every_steps=4", "evaluation.max_problems=2", "batch.prompts_per_step=8"]
    straight = run_here(of_three_kinds, *shared, "run.name=straight").run_dir
    stopped = run_here(of_three_kinds, *shared, "run.name=stopped", stop_after=2)
    assert not stopped.finished
    resumed = run_here(of_three_kinds, *shared, "run.name=stopped", resume=True).run_dir
    assert drawn(resumed) == drawn(straight)
    log = metrics(straight)
    for line, again in zip(log.steps, metrics(resumed).steps, strict=True):
        assert [line.values[f"source/{name}/groups"] for name in KINDS] == [2, 4, 2]
        assert line.values["mean_ratio"] == pytest.approx(1.0, abs=1e-3), "trained on what was sampled"
        skipped = [f"source/{name}/curriculum_skipped" for name in KINDS]
        assert [line.values[name] for name in skipped] == [again.values[name] for name in skipped]
    total = {name: sum(line.values[f"source/{name}/curriculum_skipped"] for line in log.steps) for name in KINDS}
    assert total["digits"] > 0, "its epochs are over soonest, and not all of its tasks are worth another group"
    assert total["even"] == total["calculator"] == 0, "they have problems that are new"
    assert sum(line.values["tool_calls/calculate"] for line in log.steps) > 0
    assert all(0 < line.values["source/digits/reward"] < 1 for line in log.steps)
    assert set(log.evaluations[-1].by_source) == set(KINDS)
