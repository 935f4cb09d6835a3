"""The example of tools: a model that guesses or asks its calculator learns to ask."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from lachesis.metrics.sinks.tape import read_groups, tape_files
from tests.e2e.runs import Main, metrics
from tests.paths import EXAMPLES, ROOT

MCP_CALCULATOR = """
from mcp.server.mcpserver import MCPServer

from calculator import calculate

server = MCPServer("calculator", log_level="WARNING")
server.tool()(calculate)
server.run()
"""


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example in a directory of its own; the first run makes its model and problems."""
    without = shutil.ignore_patterns(".cache", "__pycache__", "runs")
    directory = tmp_path_factory.mktemp("example")
    return Path(shutil.copytree(EXAMPLES / "tools", directory / "tools", ignore=without))


def test_it_learns_to_use_the_tool(example: Path, main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    outcome = main("train", str(example / "config.yaml"))
    assert outcome.code == 0, outcome.err
    run_dir = tmp_path / "runs" / "tools"
    log = metrics(run_dir)
    assert log.evaluations[-1].accuracy - log.evaluations[0].accuracy >= 0.2
    calls = [line.values["tool_calls"] for line in log.steps]
    assert sum(calls[-5:]) > 1.5 * sum(calls[:5])
    assert all(line.values["turns"] >= 64 for line in log.steps)
    first = read_groups(sorted(tape_files(run_dir / "rollouts").items())[0][1])
    masked = [sample for group in first for sample in group.samples if sample.mask is not None]
    assert masked
    assert all("<tool>" in sample.text for sample in masked)


def test_its_tool_may_be_a_server_of_the_model_context_protocol(
    example: Path, main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (example / "served.py").write_text(MCP_CALCULATOR)
    command = f"{{command: [{sys.executable}, served.py], env: {{PYTHONPATH: '{ROOT / 'src'}:{example}'}}}}"
    text = (example / "config.yaml").read_text().replace("  eval_path: .cache/eval.jsonl\n", "")
    text = text.replace("  every_steps: 15\n", "")
    config = example / "served.yaml"
    config.write_text(text.replace("calculator.calculate", command).replace("steps: 30", "steps: 1"))
    monkeypatch.chdir(tmp_path)
    outcome = main("train", str(config))
    assert outcome.code == 0, outcome.err
    (line,) = metrics(tmp_path / "runs" / "tools").steps
    assert line.values["tool_calls/calculate"] > 0
    assert line.values["tool_errors"] < line.values["tool_calls"]
