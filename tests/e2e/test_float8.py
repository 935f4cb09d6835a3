"""Runs whose products are in float8, emulated: they learn, are proved as tightly as others, and resume exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lachesis.train.distributed.strategy import decoder_layers
from tests import warm
from tests.contracts.formats.test_float8 import gradients, load, logprobs, make_policy, write_model
from tests.e2e.runs import metrics, run_here, write_run
from tests.e2e.test_learning import rise, share_of_a
from tests.e2e.test_resume import assert_equal_runs
from tests.long import long_but
from tests.ports import free_port

pytest.importorskip("torchao")

CORRECTED = {"sampler_correction": "token_truncate"}


@pytest.mark.parametrize(
    "scaling",
    long_but(
        ["float8", "float8_rowwise"],
        short=["float8"],
        why="test_it_learns_and_saves_an_ordinary_model[float8]: another scale, whose products the contracts test",
    ),
)
def test_it_learns_and_saves_an_ordinary_model(tmp_path: Path, scaling: str):
    sections = {"model": {"matmul_dtype": scaling}, "algorithm": CORRECTED, "checkpoint": {"save_final": True}}
    summary = run_here(write_run(tmp_path, **sections))
    assert rise(summary.run_dir) > 0.6
    assert share_of_a(AutoModelForCausalLM.from_pretrained(summary.run_dir / "final"), tmp_path) > 0.9
    steps = [line.values for line in metrics(summary.run_dir).steps]
    assert all(values["canary_error"] < 1e-4 for values in steps), "the canary is read without"
    assert 1e-3 < steps[0]["logprob_diff_mean"] < 0.3, "and the loss is not, which shows until all are sure of an a"


def test_a_stopped_run_goes_on_exactly(tmp_path: Path):
    sections = {
        "model": {"matmul_dtype": "float8"},
        "run": {"steps": 6},
        "algorithm": CORRECTED | {"beta": 0.01},
        "checkpoint": {"every_steps": 3, "save_final": True},
    }
    straight = run_here(write_run(tmp_path / "straight", **sections))
    config = write_run(tmp_path / "stopped", **sections)
    assert not run_here(config, stop_after=3).finished
    assert_equal_runs(run_here(config, resume=True).run_dir, straight.run_dir)


def test_a_server_holds_the_same_weights_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LACHESIS_SESSION_DIR", str(tmp_path / "sessions"))
    warm.fork_servers(monkeypatch.setattr)
    sections = {
        "model": {"matmul_dtype": "float8"},
        "run": {"steps": 2},
        "engine": {"kind": "embedded_server", "port": free_port()},
        "bridge": {"kind": "broadcast"},
        "algorithm": CORRECTED,
    }
    summary = run_here(write_run(tmp_path, **sections))
    for line in metrics(summary.run_dir).steps:
        assert line.values["canary_error"] < 1e-3
        assert line.values["weight_version"] == line.step


@pytest.mark.parametrize(
    ("part", "backend", "dynamic"),
    [
        # As it trains: any number of tokens. Tracing attention's backward with unknown sizes takes far longer than all
        # of these together, so that is traced with known ones, and with unknown ones what is float8's own.
        ("", "eager", True),
        ("", "aot_eager", False),
        ("mlp", "aot_eager", True),
    ],
    ids=["any size", "with its backward", "float8's backward at any size"],
)
def test_a_compiled_layer_is_not_broken_by_float8_and_follows_the_switch(
    tmp_path: Path, part: str, backend: str, dynamic: bool
):
    saved = write_model(tmp_path)
    plain, policy = make_policy(load(saved, "float8")), make_policy(load(saved, "float8"))
    expected, expected_off = gradients(plain), logprobs(plain, active=False)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    decoder_layers(policy.transformer)[0].get_submodule(part).compile(dynamic=dynamic, backend=backend)
    torch.testing.assert_close(gradients(policy), expected, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(logprobs(policy, active=False), expected_off, rtol=1e-4, atol=1e-5)
    # Attention by buckets, which a CPU has, stays out of graphs; that by kernels of a GPU is part of them.
    breaks = [reason for reason in torch._dynamo.utils.counters["graph_break"] if "bucketed_attention" not in reason]
    assert not breaks
