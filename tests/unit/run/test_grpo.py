"""`lachesis grpo`: words, help, documented lines and errors."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from lachesis.common.errors import ConfigError, EngineError
from lachesis.config.dialects.atropos_names import TRAINER
from lachesis.config.load import load_argv
from lachesis.run.grpo import benchmark, documented_lines, grpo, help_text, require_server, split_words

VALUES = {"step_time": 2.0, "sync_time": 0.5}


def test_our_own_words_are_told_from_theirs():
    asked = split_words(
        ["--model-name", "m", "--resume", "--set", "a=1", "--set=b=2", "--benchmark", "--overwrite", "--engine", "x"],
        valued=("engine",),
    )
    assert asked.flags == ("--model-name", "m")
    assert asked.overrides == ("a=1", "b=2")
    assert (asked.resume, asked.overwrite, asked.benchmark, asked.help) == (True, True, True, False)
    assert asked.value("engine") == "x"


def test_a_word_of_ours_without_its_value_is_refused():
    with pytest.raises(ConfigError, match="--set: it needs a value"):
        split_words(["--set"])


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


def test_help_trains_nothing():
    said: list[str] = []
    assert grpo(["--help"], say=said.append) is None
    assert "--weight-bridge-mode" in said[0]


def test_a_server_that_does_not_run_is_named_with_the_command_that_starts_it():
    flags = ["--weight-bridge-mode", "lora_only", "--vllm-port", "9", "--lora-r", "32", "--dtype", "bfloat16"]
    config = load_argv(["--model-name", "m", *flags]).config
    with pytest.raises(EngineError, match="External vLLM server required on port 9: ") as raised:
        require_server(config)
    command = "lachesis serve --model m --port 9 --dtype bfloat16 --enable-lora --max-lora-rank 32"
    assert raised.value.remedy == f"start it with `{command}`"


def test_a_server_for_all_weights_needs_no_adapters():
    config = load_argv(["--model-name", "m", "--single-copy", "--vllm-port", "9"]).config
    with pytest.raises(EngineError) as raised:
        require_server(config)
    assert raised.value.remedy == "start it with `lachesis serve --model m --port 9`"


def test_a_server_of_the_run_s_own_need_not_run_yet():
    require_server(load_argv(["--model-name", "m", "--weight-bridge-mode", "none", "--vllm-port", "9"]).config)


def test_documented_lines_are_said_and_others_are_not():
    said: list[str] = []
    logger = logging.getLogger("lachesis")
    before = logger.level
    with documented_lines(said.append):
        logging.getLogger("lachesis.bridges.shared").info("[SINGLE-COPY] Weights updated in-place - step %d", 3)
        logger.info("Attached %d tensors", 7)
        logger.info("something else")
        logger.warning("[LORA] a warning is said by others")
    logger.info("[NCCL] afterwards nothing is")
    assert said == ["[SINGLE-COPY] Weights updated in-place - step 3", "Attached 7 tensors"]
    assert logger.level == before


def test_the_benchmark_lists_all_times(tmp_path: Path):
    lines = [
        {"type": "step", "step": step, "time": 0.0, "values": VALUES | {"data_fetch_time": step}} for step in (1, 2)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = benchmark(tmp_path, mode="lora_only")
    assert "benchmark: lora_only, 2 steps" in text
    assert "step_times: mean 2.000 s, max 2.000 s, total 4.00 s" in text
    assert "data_fetch_times: mean 1.500 s" in text
    assert "[1.000, 2.000]" in text
    assert "gpu_memories: none" in text
