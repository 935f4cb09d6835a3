"""An engine that holds its weights in 8 bits, fed by a trainer that does not: real vLLM, each update proved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch

from lachesis.bridges.fleet_proof import FleetProof
from lachesis.bridges.proof import SyncProof
from lachesis.common.errors import StaleWeights
from lachesis.common.types import GenerationRequest, SamplingParams
from lachesis.config.schema import LachesisConfig
from lachesis.engines.http.client import HttpEngine
from lachesis.run.context import EngineSide
from lachesis.train.batch import pack
from lachesis.train.policy import Policy
from tests.contracts.bridge_cases import PROMPT, soon
from tests.contracts.servers import CHAT_TEMPLATE, python_path
from tests.contracts.vllm_server import ENVIRONMENT, build_model, entry_point, needs_vllm
from tests.ports import free_port
from tests.sides import two_sides
from tests.tiny import tiny_tokenizer
from tests.unit.train.model.test_forward import random_groups

pytestmark = [needs_vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def sides(
    session_environment: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[EngineSide, Policy]]:
    """Trainer and engine of a run, after the first sync."""
    directory = tmp_path_factory.mktemp("fp8")
    for name, value in (ENVIRONMENT | {"PYTHONPATH": python_path(entry_point(directory))}).items():
        session_environment.setenv(name, value)
    build_model().bfloat16().save_pretrained(directory / "model")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory / "model")
    config = LachesisConfig.model_validate(
        {
            "run": {"name": "run", "dir": str(directory), "steps": 100},
            "model": {"path": str(directory / "model"), "dtype": "bfloat16", "device": "cpu"},
            "engine": {
                "kind": "vllm", "port": free_port(), "max_model_len": 64, "enforce_eager": True, "quantization": "fp8",
            },
            "bridge": {"kind": "broadcast"},
            "optimizer": {"learning_rate": 1e-2, "schedule": "constant"},
            "deadlines": {"sync_s": 60, "engine_start_s": 240, "generation_s": 60},
        }
    )  # fmt: skip
    with two_sides(config, directory) as both:
        yield both


def proof_of(side: EngineSide) -> SyncProof:
    assert isinstance(side.bridge.proof, FleetProof)
    return side.bridge.proof.of(side.bridge.engine.living[0])  # type: ignore[attr-defined]


def ask_digests(side: EngineSide) -> Mapping[str, int]:
    proof = proof_of(side)
    return proof.ask_engine(proof.token_ids())[1]


def test_what_arrives_is_rounded_as_the_trainer_rounds_it(sides: tuple[EngineSide, Policy]):
    side, policy = sides
    assert isinstance(side.bridge.engine, HttpEngine)
    (control,) = side.bridge.engine.controls
    held = control.state_dict_info(deadline=soon("the test"))
    assert {info.dtype for name, info in held.items() if "_proj.weight" in name} >= {"float8_e4m3fn"}
    for version in (1, 2):
        before = ask_digests(side)
        policy.accumulate(pack(random_groups(groups=2, samples=4, longest=6, seed=version), max_tokens=256))
        with side.bridge.update_to(version):
            policy.step()
        proof = proof_of(side)
        ours, theirs = proof.trainer_digests(), ask_digests(side)
        assert ours == theirs and theirs != before
        assert sum(name.endswith("_scale") for name in ours) == 7 * policy.transformer.config.num_hidden_layers
    status = control.receiver_status(deadline=soon("the test"))
    assert (status.updates, status.copied) == (3, 2), "vLLM's loader takes the first alone, version 0"


def test_its_logprobs_are_near_the_trainers_and_not_they(sides: tuple[EngineSide, Policy]):
    side, policy = sides
    request = GenerationRequest(PROMPT, SamplingParams(16), n=8, seed=3)
    gaps = []
    for completion in side.bridge.engine.generate([request], deadline=soon("the test"))[0]:
        ours = policy.canary([*PROMPT, *completion.token_ids])[len(PROMPT) - 1 :]
        gaps += [abs(a - b) for a, b in zip(ours, completion.logprobs, strict=True)]
    assert 0.001 < sum(gaps) / len(gaps) < 0.3


def test_a_row_that_is_not_the_trainers_is_found(sides: tuple[EngineSide, Policy]):
    """Too small a change for a canary, and enough for a digest."""
    side, policy = sides
    parameter = policy.transformer.get_parameter("model.layers.0.self_attn.k_proj.weight")
    with torch.no_grad():
        parameter[1] *= 2  # the bytes stay, the scale doubles
    with pytest.raises(
        StaleWeights, match=r"1 differs from the trainer's \(model.layers.0.self_attn.k_proj.weight_scale\)"
    ):
        proof_of(side).confirm(version=side.bridge.version)
    with torch.no_grad():
        parameter[1] /= 2
    proof_of(side).confirm(version=side.bridge.version)
