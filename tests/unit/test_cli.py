"""The command line in this process: codes, and one line for each error. Runs are in tests/e2e."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import lachesis
from lachesis import cli
from lachesis.cli.base import conclude, stop_on_signals
from lachesis.cli.commands import COMMANDS
from lachesis.common import errors
from lachesis.common.types import EvalResult, StepRecord
from lachesis.metrics.sinks.jsonl import JsonlSink
from lachesis.plugins.dialects.commands import keys
from tests.logs import handlers_kept
from tests.unit.plugins.report.test_watch import write_run

CONFIG = """
run: {steps: 3}
model: {path: model}
data: {path: problems.jsonl}
rewards: {functions: [rewards.right]}
"""


@dataclass(frozen=True, slots=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The only line on standard error."""
        (line,) = self.err.splitlines()
        return line


Command = Callable[..., Answer]


@pytest.fixture
def lachesis_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["lachesis", *map(str, arguments)])
        with handlers_kept(), pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        return Answer(int(exit_.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


class TestUsage:
    def test_the_version(self, lachesis_command: Command):
        answer = lachesis_command("--version")
        assert (answer.code, answer.out.strip(), answer.err) == (0, lachesis.__version__, "")

    @pytest.mark.parametrize("arguments", [(), ("--help",)], ids=["nothing", "--help"])
    def test_help_lists_the_commands(self, lachesis_command: Command, arguments: tuple[str, ...]):
        answer = lachesis_command(*arguments)
        assert answer.code == 0
        assert all(f"\n  {name} " in answer.out for name in ("train", "report", "explain", "doctor", "scripts"))

    @pytest.mark.parametrize(
        ("arguments", "cause"),
        [
            (("trian", "config.yaml"), "No such command 'trian'. Did you mean 'train'"),
            (("train", "--resum", "config.yaml"), "No such option: --resum"),
            (("train",), "Missing argument"),
            (("explain", "a", "b"), "unexpected extra argument"),
        ],
    )
    def test_what_is_misspelt_is_one_line_and_code_2(
        self, lachesis_command: Command, arguments: tuple[str, ...], cause: str
    ):
        answer = lachesis_command(*arguments)
        assert answer.code == 2
        assert answer.error.startswith("error: ")
        assert cause in answer.error
        assert answer.error.endswith("-> see lachesis --help")


class TestExplain:
    def test_a_key_has_type_default_and_a_sentence(self, lachesis_command: Command):
        answer = lachesis_command("explain", "algorithm.epsilon")
        assert answer.code == 0
        assert "algorithm.epsilon: number >= 0, default 0.2" in answer.out
        assert "clipped below" in answer.out

    def test_a_required_key_says_so(self, lachesis_command: Command):
        assert "model.path: text, required" in lachesis_command("explain", "model.path").out

    def test_a_section_shows_all_its_keys(self, lachesis_command: Command):
        out = lachesis_command("explain", "checkpoint").out
        assert all(f"checkpoint.{name}:" in out for name in ("every_steps", "keep_last", "save_final"))

    def test_a_key_of_one_variant_names_the_variant(self, lachesis_command: Command):
        assert "(only with kind lora)" in lachesis_command("explain", "adapter.dropout").out

    def test_an_unknown_key_gets_the_nearest(self, lachesis_command: Command):
        answer = lachesis_command("explain", "optimizer.lerning_rate")
        assert answer.code == 2
        assert answer.error == (
            "error: no key is called 'optimizer.lerning_rate' -> did you mean optimizer.learning_rate?"
        )

    def test_brackets_and_colons_are_shown_as_they_are(self, lachesis_command: Command):
        """They would be styles and emoji to the terminal library."""
        answer = lachesis_command("explain", "[red]:heart:[/red]")
        assert "'[red]:heart:[/red]'" in answer.error


class TestErrors:
    def test_a_missing_configuration(self, lachesis_command: Command, tmp_path: Path):
        answer = lachesis_command("train", tmp_path / "none.yaml")
        assert answer.code == 2
        assert answer.error == f"error: no configuration file {tmp_path / 'none.yaml'} -> check the path"

    def test_several_problems_are_a_line_each(self, lachesis_command: Command, config: Path):
        answer = lachesis_command("train", config, "--set", "run.steps=0", "--set", "run.sed=1")
        assert answer.code == 2
        first, *rest = answer.err.splitlines()
        assert first.startswith("error: ")
        assert "2 problems" in first
        assert len(rest) == 2
        assert any("run.steps" in line for line in rest)
        assert any("run.sed" in line and "run.seed" in line for line in rest)

    def test_traceback_shows_where_it_came_from(self, lachesis_command: Command, tmp_path: Path):
        path = tmp_path / "none.yaml"
        answer = lachesis_command("--traceback", "train", path)
        assert answer.code == 2
        assert "Traceback" in answer.err
        assert "document.py" in answer.err
        assert answer.err.splitlines()[-1] == f"error: no configuration file {path} -> check the path"
        assert "Traceback" not in lachesis_command("train", path).err

    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (errors.LachesisError, 1),
            (errors.ConfigError, 2),
            (errors.DataError, 3),
            (errors.RewardError, 4),
            (errors.ModelError, 5),
            (errors.EngineError, 6),
            (errors.StaleWeights, 7),
            (errors.DeadlineExceeded, 8),
            (errors.CheckpointError, 9),
            (errors.TrainingError, 10),
            (errors.DependencyError, 11),
        ],
    )
    def test_every_kind_of_error_has_its_own_code(
        self, lachesis_command: Command, monkeypatch: pytest.MonkeyPatch, error: type[errors.LachesisError], code: int
    ):
        answer = failing(lachesis_command, monkeypatch, error("it went wrong in [here]", remedy="fix it"))
        assert answer.code == code
        assert answer.error == "error: it went wrong in [here] -> fix it"

    def test_a_full_device_is_no_fault_of_ours(self, lachesis_command: Command, monkeypatch: pytest.MonkeyPatch):
        full = type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate 2 GiB")
        answer = failing(lachesis_command, monkeypatch, full)
        assert answer.code == errors.TrainingError.exit_code
        assert answer.error.startswith("error: the device's memory is full: CUDA out of memory.")
        assert "-> lower batch.max_tokens_per_microbatch" in answer.error

    def test_a_fault_of_ours_asks_for_a_report(self, lachesis_command: Command, monkeypatch: pytest.MonkeyPatch):
        answer = failing(lachesis_command, monkeypatch, ZeroDivisionError("division by zero"))
        assert answer.code == 70
        assert answer.error.startswith("error: ZeroDivisionError: division by zero -> this is a bug in Lachesis")
        assert "lachesis --traceback" in answer.error

    def test_a_path_that_cannot_be_written_is_no_fault_of_ours(
        self, lachesis_command: Command, monkeypatch: pytest.MonkeyPatch
    ):
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/first/report.html")
        answer = failing(lachesis_command, monkeypatch, full)
        assert answer.code == errors.ConfigError.exit_code
        assert answer.error.startswith("error: runs/first/report.html: No space left on device -> check this path")

    def test_an_interrupt_is_told_by_its_code(self, lachesis_command: Command, monkeypatch: pytest.MonkeyPatch):
        answer = failing(lachesis_command, monkeypatch, KeyboardInterrupt())
        assert answer.code == 128 + signal.SIGINT
        assert "Traceback" not in answer.err


def failing(command: Command, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> Answer:
    def explain(key: str) -> Any:
        raise error

    monkeypatch.setattr(keys, "explain", explain)
    return command("explain", "anything")


class TestReport:
    def test_it_is_written_anew_and_named_as_one_would_type_it(
        self, lachesis_command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ):
        monkeypatch.chdir(tmp_path)
        sink = JsonlSink(Path("runs/first/metrics.jsonl"))
        sink.evaluation(EvalResult(step=0, accuracy=0.25, mean_reward=0.25, problems=4, mean_length=2.0, seconds=0.1))
        sink.write(StepRecord(step=1, values={"reward": 0.5, "step_time": 1.0}))
        sink.close()
        answer = lachesis_command("report", "runs/first")
        assert (answer.code, answer.out) == (0, "report: runs/first/report.html\n")
        assert "<html" in Path("runs/first/report.html").read_text()

    def test_a_directory_without_a_run_is_an_error_of_data(self, lachesis_command: Command, tmp_path: Path):
        (tmp_path / "report.html").touch()
        for place in (tmp_path, tmp_path / "report.html"):
            answer = lachesis_command("report", place)
            assert answer.code == 3
            assert "metrics.jsonl does not exist -> give the directory of a run" in answer.error


@pytest.mark.parametrize("words", [("run-api",), ("serve", "--model", "m"), ("vllm-serve", "config.yaml")])
@pytest.mark.parametrize("port", ["65536", "-1"])
def test_a_port_that_is_none_is_refused(lachesis_command: Command, words: tuple[str, ...], port: str):
    answer = lachesis_command(*words, "--port", port)
    assert answer.code == 2 and "--port" in answer.error and "bug in Lachesis" not in answer.error


def test_a_run_that_is_stopped_before_its_first_step_ends_as_a_signal_does(capsys: pytest.CaptureFixture[str]):
    with handlers_kept(), pytest.raises(typer.Exit) as exit_, stop_on_signals():
        signal.raise_signal(signal.SIGINT)
        raise errors.StopRequested("it was asked to stop")
    assert exit_.value.exit_code == 128 + signal.SIGINT
    assert "it was asked to stop" in capsys.readouterr().err


class TestLookingAtRuns:
    @pytest.fixture
    def run_dir(self, tmp_path: Path) -> Path:
        sink = JsonlSink(tmp_path / "run" / "metrics.jsonl")
        for step in (1, 2):
            sink.write(StepRecord(step=step, values={"reward": 0.5, "step_time": 1.0, "train_time": 0.5}))
        sink.close()
        return tmp_path / "run"

    def test_runs_are_compared(self, lachesis_command: Command, run_dir: Path, tmp_path: Path):
        out = tmp_path / "both.html"
        assert lachesis_command("compare", run_dir, run_dir, "--out", out).code == 0
        assert "the configurations are the same" in out.read_text()
        assert "a comparison needs two runs" in lachesis_command("compare", run_dir).error

    def test_rollouts_are_searched_and_read(self, lachesis_command: Command, tmp_path: Path):
        run_dir = write_run(tmp_path / "run")
        listed = lachesis_command("rollouts", run_dir, "--find", "4", "--limit", "1")
        assert listed.code == 0 and listed.out.split()[:5] == ["place", "reward", "prompt", "id", "completion"]
        assert listed.out.splitlines()[1].split() == ["2:1:1", "1", "7", "4"]
        assert "1 rollouts, and more (--limit)" in listed.out
        assert "[assistant]" in lachesis_command("rollouts", run_dir, "1:1:2").out
        assert "0 failed rollouts" in lachesis_command("rollouts", run_dir, "--failed").out

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["1:1"], "not the place of a rollout"),
            (["--steps", "1-"], "neither a step"),
        ],
    )
    def test_what_cannot_be_searched_for_is_said(
        self, lachesis_command: Command, tmp_path: Path, words: list[str], message: str
    ):
        answer = lachesis_command("rollouts", write_run(tmp_path / "run"), *words)
        assert answer.code != 0 and message in answer.err

    def test_what_is_no_run_is_not_watched(self, lachesis_command: Command, tmp_path: Path):
        answer = lachesis_command("watch", tmp_path / "none")
        assert (answer.code, "has no run" in answer.error) == (errors.DataError.exit_code, True)

    def test_one_that_was_stopped_by_the_page_is_no_failure(self, capsys: pytest.CaptureFixture[str], tmp_path: Path):
        summary: Any = SimpleNamespace(run_dir=tmp_path, finished=False, steps=4)
        with pytest.raises(typer.Exit) as exit_:
            conclude(summary, [], ["lachesis", "train", "config.yaml"])
        assert exit_.value.exit_code == 0
        said = capsys.readouterr().out
        assert "stopped by request after step 4; resume with: lachesis train config.yaml --resume" in said


class TestHelp:
    def test_all_commands_are_in_the_table_and_in_its_order(self, lachesis_command: Command):
        group: Any = typer.main.get_command(cli.app)
        assert set(group.commands) == set(COMMANDS)
        shown = lachesis_command("-h").out
        assert [shown.index(f"\n  {name} ") for name in COMMANDS] == sorted(
            shown.index(f"\n  {name} ") for name in COMMANDS
        )


def test_a_missing_model_is_said_once(lachesis_command: Command):
    assert lachesis_command("grpo").err.count("missing") == 1


def test_a_host_that_is_none_is_said(lachesis_command: Command, tmp_path: Path):
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG + "engine: {kind: vllm, host: 'a b'}\nbridge: {kind: shared_vllm}\n")
    answer = lachesis_command("plan", str(config))
    assert answer.code == 2 and "engine.host" in answer.err and "'a b'" in answer.err


def test_plan_takes_the_flags_of_grpo_too(lachesis_command: Command):
    flags = ("--model-name", "Qwen/Qwen3-8B", "--weight-bridge-mode", "lora_only", "--lora-r", "16")
    answer = lachesis_command("plan", *flags, "--device", "cuda", "--gpus", "16", "--nodes", "2", "--fit", "48")
    assert answer.code == 0, answer.err
    for expected in ("8,190,735,360", "table of known models", "on 2 x 8 GPUs of 80 GB", "it fits"):
        assert expected in answer.out
    assert "on one card" not in answer.out, "who asks for a node wants no single card"
    assert lachesis_command("plan", "a.yaml", "--fitt", "3").code == 2


def test_the_size_of_a_card_is_taken_as_people_write_it(lachesis_command: Command):
    flags = ("--model-name", "Qwen/Qwen3-8B", "--weight-bridge-mode", "lora_only", "--lora-r", "16")
    said = [lachesis_command("plan", *flags, "--fit", size) for size in ("48", "48GB", "48 gib")]
    assert {answer.code for answer in said} == {0}, said[0].err
    assert len({answer.out for answer in said}) == 1
    for size in ("0.5", "large"):
        answer = lachesis_command("plan", *flags, "--fit", size)
        assert answer.code == 2 and f"{size!r} is not a card's size" in answer.err


def test_torchrun_is_given_the_sentence_of_an_error(
    lachesis_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    answer = lachesis_command("plan", str(tmp_path / "none.yaml"))
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=answer.code, error_file=str(file))
    shown = ChildFailedError("lachesis", {0: failure}).format_msg()
    assert f"traceback : no configuration file {tmp_path / 'none.yaml'}" in shown
    assert "To enable traceback" not in shown
