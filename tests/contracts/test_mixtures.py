"""A mixture of experts through the bridges: transformers stacks the experts of a layer, files and vLLM have each alone.

Nothing is repeated here of what holds of any model; each case goes once through.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from lachesis.bridges.sent_weights import full_weights
from lachesis.common.errors import StaleWeights
from tests.contracts.bridge_cases import TOLERANCE, Case, Live, build, reset
from tests.contracts.bridge_faults import Tampering
from tests.contracts.servers import EMBEDDED_SERVER, Server, running
from tests.contracts.test_bridge_contract import check_engine
from tests.contracts.vllm_server import SIZES, VLLM_SERVER, needs_vllm, start_vllm
from tests.e2e.runs import metrics, rewards, run_here, write_reward, write_run
from tests.tiny import tiny_model

EMBEDDED = [
    Case("embedded", {"kind": "broadcast"}),
    Case("embedded", {"kind": "broadcast"}, lora=True),
    Case("embedded", {"kind": "reload"}),
    Case("embedded", {"kind": "shared_vllm"}),
    Case("embedded", {"kind": "lora_nccl"}, lora=True),
]
# vLLM's kernels for the CPU run no mixture beside adapters, and repack experts too.
VLLM = [
    Case("vllm", {"kind": "broadcast"}, exact=False),
    Case("vllm", {"kind": "broadcast"}, lora=True, exact=False),
    Case("vllm", {"kind": "reload"}, exact=False),
]

LETTERS = "return [sum(letter.islower() for letter in text) / max(len(text), 1) for text in texts]"


def build_model(seed: int) -> PreTrainedModel:
    """A Qwen3 with eight experts, two of which a token goes through."""
    experts = {"num_experts": 8, "moe_intermediate_size": 64, "head_dim": 32, "norm_topk_prob": True}
    return tiny_model("qwen3_moe", seed=seed, **SIZES, **experts)


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(replace(EMBEDDED_SERVER, build_model=build_model), tmp_path_factory.mktemp("embedded")) as server:
        yield server


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    factory = replace(VLLM_SERVER, build_model=build_model, start=partial(start_vllm, lora=False))
    with running(factory, tmp_path_factory.mktemp("vllm")) as server:
        yield server


@pytest.fixture(params=[pytest.param(c, id=c.name, marks=needs_vllm if c in VLLM else ()) for c in EMBEDDED + VLLM])
def live(request: pytest.FixtureRequest, session_environment: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Live]:
    """The bridge of a case after its first synchronization."""
    with bridged(request.param, request.getfixturevalue(request.param.engine), tmp_path.name) as built:
        yield built


@contextmanager
def bridged(case: Case, server: Server, name: str) -> Iterator[Live]:
    if case.engine == "vllm":
        server.post("/bridge/reload", path=str(server.model), weight_version=0)
    else:
        reset(server)
    (directory := server.root / name).mkdir()
    built = build(case, model=server.model, directory=directory, servers=[server], tampering=Tampering())
    try:
        built.bridge.sync(0)
        yield built
    finally:
        built.side.close()


def test_every_expert_arrives(live: Live):
    for _ in range(2):
        live.update()
        check_engine(live)
        assert live.bridge.last_report is not None and live.bridge.last_report.version == live.version


def test_one_expert_that_is_off_by_a_last_bit_is_found(
    embedded: Server, session_environment: pytest.MonkeyPatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    experts = "model.layers.1.mlp.experts.down_proj"

    def tampered(model: torch.nn.Module, **how: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in full_weights(model, **how):
            if name == experts:
                tensor = tensor.clone()
                tensor[3, 0, 0] *= 1 + 2**-20
            yield name, tensor

    with bridged(EMBEDDED[0], embedded, tmp_path.name) as live:
        monkeypatch.setattr("lachesis.bridges.broadcast.full_weights", tampered)
        with pytest.raises(StaleWeights, match=f"1 differs from the trainer's .{experts}"):
            live.bridge.sync(1)
        assert live.difference() < TOLERANCE, "by logprobs nobody would have known"


def test_a_run_over_a_server_replays_the_experts_that_it_used(
    embedded: Server, session_environment: pytest.MonkeyPatch, tmp_path: Path
):
    """Through the answer of ``/generate``, the feed that generates ahead, and two optimizer steps on each batch."""
    reset(embedded)
    path = write_run(
        tmp_path,
        run={"dir": str(embedded.root / tmp_path.name), "steps": 4},
        model={"path": str(embedded.model)},
        engine={"kind": "http", "urls": [str(embedded.http.base_url)], "takeover": True},
        bridge={"kind": "broadcast"},
        pipeline={"async_prefetch": True},
        algorithm={"router_replay": True, "num_iterations": 2, "sampler_correction": "token_truncate"},
    )
    first, *others = metrics(run_here(path).run_dir).steps
    assert first.values["router_replay_difference"] < 0.01 and first.values["logprob_diff_max"] < 1e-3
    assert all(0.01 < line.values["router_replay_difference"] <= 1 for line in others), "of older weights"


@needs_vllm
def test_vllm_without_the_flag_says_what_to_start_it_with(vllm: Server):
    reply = vllm.http.post("/generate", json={"prompt_token_ids": [5, 6], "max_tokens": 2, "routed_experts": True})
    assert reply.status_code == 422
    assert "--enable-return-routed-experts" in reply.json()["error"]["remedy"]


@needs_vllm
def test_a_run_over_vllm_learns(vllm: Server, session_environment: pytest.MonkeyPatch, tmp_path: Path):
    """All weights travel; the reward is the share of small letters, at first about a quarter."""
    path = write_run(
        tmp_path,
        run={"dir": str(vllm.root / tmp_path.name), "steps": 12},
        model={"path": str(vllm.model)},
        engine={"kind": "http", "urls": [str(vllm.http.base_url)], "takeover": True},
        bridge={"kind": "broadcast"},
        rewards={"functions": [write_reward(tmp_path, LETTERS)]},
    )
    run_dir = run_here(path).run_dir
    found = rewards(run_dir)
    assert fmean(found[-3:]) - fmean(found[:3]) > 0.4
    for line in metrics(run_dir).steps:
        assert line.values["weight_version"] == line.step and line.values["canary_error"] < TOLERANCE
        if line.values["micro_batches"]:
            assert line.values["mean_ratio"] == pytest.approx(1.0, abs=TOLERANCE), "sampled under the weights of now"
