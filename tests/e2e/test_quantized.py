"""LoRA on base weights in 4 and 8 bits, as runs: they learn, are proved, save an adapter, and resume exactly."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from lachesis.bridges.proof import QUANTIZED_TOLERANCE
from tests import warm
from tests.e2e.runs import metrics, run_here, write_run
from tests.e2e.test_learning import rise, share_of_a, sharpen
from tests.e2e.test_resume import assert_equal_runs
from tests.long import long_but
from tests.ports import free_port

pytest.importorskip("bitsandbytes")


def write(directory: Path, quantization: str, **sections) -> Path:
    sections = {"model": {"quantization": quantization}, "adapter": {"kind": "lora", "r": 8}, **sections}
    config = write_run(directory, **sections)
    sharpen(directory)
    return config


def test_an_adapter_learns_on_nf4_and_serves_on_whole_weights(tmp_path: Path):
    summary = run_here(write(tmp_path, "nf4", checkpoint={"save_final": True}))
    assert rise(summary.run_dir) > 0.4
    for line in metrics(summary.run_dir).steps:
        assert 0 <= line.values["canary_error"] < 1e-3, "engine and trainer are one quantized model"
        assert math.isclose(line.values["mean_ratio"], 1.0, abs_tol=1e-4)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert share_of_a(PeftModel.from_pretrained(base, str(summary.run_dir / "final")), tmp_path) > 0.9


@pytest.mark.parametrize(
    "quantization",
    long_but(
        ["int8", "nf4"],
        short=["nf4"],
        why="test_a_stopped_run_goes_on_exactly[nf4]: other quantized weights, which stay as they are",
    ),
)
def test_a_stopped_run_goes_on_exactly(tmp_path: Path, quantization: str):
    sections = {"run": {"steps": 6}, "checkpoint": {"every_steps": 3, "save_final": True}}
    straight = run_here(write(tmp_path / "straight", quantization, **sections))
    config = write(tmp_path / "stopped", quantization, **sections)
    assert not run_here(config, stop_after=3).finished
    assert_equal_runs(run_here(config, resume=True).run_dir, straight.run_dir)


def test_a_server_on_whole_weights_is_proved_by_the_adapters_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its canary is off by more than rounding, the base weights being others; the adapter arrives bit for bit."""
    monkeypatch.setenv("LACHESIS_SESSION_DIR", str(tmp_path / "sessions"))
    warm.fork_servers(monkeypatch.setattr)
    sections = {
        "run": {"steps": 2},
        "engine": {"kind": "embedded_server", "port": free_port()},
        "bridge": {"kind": "lora_only"},
        "algorithm": {"sampler_correction": "token_truncate"},
    }
    summary = run_here(write(tmp_path, "nf4", **sections))
    for line in metrics(summary.run_dir).steps:
        assert 1e-3 < line.values["canary_error"] < QUANTIZED_TOLERANCE["nf4"]
        assert line.values["weight_version"] == line.step
