"""`lachesis grpo`: words, help, documented lines and errors."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import typer

from lachesis.cli import app
from lachesis.cli.base import printed_log
from lachesis.plugins.atropos.commands.grpo import DOCUMENTED, benchmark_lines, command_of
from lachesis.plugins.dialects.atropos import TRAINER
from lachesis.plugins.dialects.atropos_help import help_text

VALUES = {"step_time": 2.0, "sync_time": 0.5}


def parsed(name: str, *words: str) -> typer.Context:
    group: Any = typer.main.get_command(app)
    return group.commands[name].make_context(name, list(words))


def test_our_own_words_are_told_from_theirs():
    context = parsed(
        "run",
        *("--model-name", "m", "--resume", "--set", "a=1", "--set=b=2", "--kl-coef", "-1e-3", "--benchmark"),
        *("--overwrite", "--engine", "x", "--environment-args", "--env.max_num=3", "--api-port=8102"),
    )
    assert context.args == ["--model-name", "m", "--kl-coef", "-1e-3"]
    assert context.params == {
        "overrides": ["a=1", "b=2"], "resume": True, "overwrite": True, "benchmark": True, "engine": "x",
        "environment": None, "environment_args": "--env.max_num=3", "api_port": 8102, "ui": False,
    }  # fmt: skip


def test_a_run_that_was_stopped_goes_on_with_the_same_words():
    context = parsed(
        "run", "--lr", "1e-3", "--set", "a=1", "--overwrite", "--environment", "gsm8k", "--benchmark", "--ui",
        "--api-port=8102",
    )  # fmt: skip
    words = ["--lr", "1e-3", "--set=a=1", "--benchmark", "--ui", "--environment=gsm8k", "--api-port=8102"]
    assert command_of(context) == ["lachesis", "run", *words]


def test_a_word_of_ours_without_its_value_is_refused():
    with pytest.raises(typer.TyperException, match="'--set' requires an argument"):
        parsed("grpo", "--set")


def test_help_has_every_flag_once():
    lines = help_text().splitlines()
    flags = [
        word.rstrip(",")
        for line in lines
        if line.startswith("  --")
        for word in line.split("   ")[0].split()
        if word.startswith("--")
    ]
    assert set(flags) >= {f"--{name}" for name in TRAINER.entries}
    assert len(flags) == len(set(flags))
    assert {"Model", "Training", "LoRA", "Output"} <= set(lines)
    assert max(map(len, lines)) <= 120


def test_help_says_what_a_flag_means_and_which_key_it_sets():
    text = " ".join(help_text().split())
    assert "--learning-rate, --lr RATE Peak rate; if unset 1e-6, or 1e-5 with LoRA. [optimizer.learning_rate]" in text
    assert "--training-steps STEPS Number of optimizer steps. [run.steps, default 10]" in text
    assert "--world-size SIZE The launcher sets them: torchrun's RANK and WORLD_SIZE." in text


def test_documented_lines_are_printed_and_others_are_not(capsys: pytest.CaptureFixture[str]):
    logger = logging.getLogger("lachesis")
    before = logger.level
    with printed_log("lachesis", beginning=DOCUMENTED):
        logging.getLogger("lachesis.bridges.shared").info("[SINGLE-COPY] Weights updated in-place - step %d", 3)
        logger.info("Attached %d tensors", 7)
        logger.info("something else")
        logger.warning("[LORA] a warning is said by others")
    logger.info("[NCCL] afterwards nothing is")
    printed = capsys.readouterr().out.splitlines()
    assert printed == ["[SINGLE-COPY] Weights updated in-place - step 3", "Attached 7 tensors"]
    assert logger.level == before


def test_the_benchmark_lists_all_times(tmp_path: Path):
    lines = [
        {"type": "step", "step": step, "time": 0.0, "values": VALUES | {"data_fetch_time": step}} for step in (1, 2)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = benchmark_lines(tmp_path, mode="lora_only")
    assert "benchmark: lora_only, 2 steps" in text
    assert "step_times: mean 2.000 s, max 2.000 s, total 4.00 s" in text
    assert "data_fetch_times: mean 1.500 s" in text
    assert "[1.000, 2.000]" in text
    assert "gpu_memories: none" in text
