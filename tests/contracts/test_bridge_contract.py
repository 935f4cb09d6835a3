"""What every bridge owes to the loop. A bridge joins by adding a factory to ``BRIDGES``.

A factory can also build it with a fault: something on the way of the weights that breaks, and that the proof
of sync has to find.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from transformers import PreTrainedModel

from lachesis.bridges.base import Bridge
from lachesis.bridges.in_process import InProcessBridge
from lachesis.bridges.proof import SyncProof
from lachesis.config.schema import LoraAdapter, OptimizerConfig
from lachesis.deadline import Deadline
from lachesis.engines.base import Engine
from lachesis.engines.embedded import EmbeddedEngine
from lachesis.errors import StaleWeights, TrainingError
from lachesis.train.backends.single import SingleDevice
from lachesis.train.batch import pack
from lachesis.train.loss_options import LossOptions
from lachesis.train.model import LoadedModel, add_lora
from lachesis.train.optimizer import build_optimizer
from lachesis.train.policy import Policy
from lachesis.types import Completion, GenerationRequest, SamplingParams
from tests.tiny import EOS_ID, PAD_ID, tiny_model, tiny_tokenizer
from tests.unit.train.test_forward import random_groups

CANARY = tuple(range(20, 32))
PROMPT = (15, 16, 17, 18)
TENSORS = ("embed_tokens", "layers.0.self_attn.q_proj", "layers.1.mlp.down_proj", "layers.1.input_layernorm", "lm_head")

# "none", "nothing arrives", "the version lags", "another session answers", or one of TENSORS that arrives changed.
Fault = str


@dataclass(frozen=True, slots=True)
class Factory:
    """How to make a prepared bridge, also one with a fault."""

    name: str
    build: Callable[[Fault], tuple[Bridge[Policy], Policy]]


class LaggingEngine(EmbeddedEngine):
    def set_version(self, version: int) -> None:
        super().set_version(max(0, version - 1))


def build_in_process(fault: Fault = "none", *, lora: bool = False) -> tuple[Bridge[Policy], Policy]:
    def build_engine(policy: Policy) -> Engine:
        make = LaggingEngine if fault == "the version lags" else EmbeddedEngine
        return make(
            engine_weights(policy.transformer, fault),
            eos_token_ids=[EOS_ID],
            pad_token_id=PAD_ID,
            max_batch_size=16,
            max_context=64,
        )

    def build_proof(policy: Policy, engine: Engine) -> SyncProof:
        session = "of another run" if fault == "another session answers" else engine.health().session_id
        return SyncProof(
            token_ids=CANARY, trainer=policy.canary, engine=engine.canary, session_id=session, dtype="float32"
        )

    bridge: InProcessBridge[Policy] = InProcessBridge(engine_builder=build_engine, proof_builder=build_proof)
    return bridge, bridge.prepare(partial(build_policy, lora=lora))


def engine_weights(model: PreTrainedModel, fault: Fault) -> PreTrainedModel:
    """The trainer's own module, or a copy of it where a fault keeps weights from arriving."""
    tensors = [tensor for tensor in TENSORS if tensor == fault]
    if not tensors and fault != "nothing arrives":
        return model
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if tensors and tensors[0] in name:
                parameter *= 1.2
    return model


def build_policy(*, lora: bool) -> Policy:
    transformer = tiny_model()
    torch.manual_seed(0)
    model = add_lora(transformer, LoraAdapter(r=4)) if lora else transformer
    return Policy(
        LoadedModel(model=model, transformer=transformer, tokenizer=tiny_tokenizer()),
        backend=SingleDevice(),
        optimizer_builder=partial(build_optimizer, config=OptimizerConfig(), learning_rate=2e-2, total_steps=10),
        options=LossOptions(),
    )


BRIDGES = [
    Factory("in_process", build_in_process),
    Factory("in_process, lora", partial(build_in_process, lora=True)),
]


@pytest.fixture(params=BRIDGES, ids=lambda factory: factory.name)
def factory(request: pytest.FixtureRequest) -> Factory:
    return request.param


@pytest.fixture
def built(factory: Factory) -> Iterator[tuple[Bridge[Policy], Policy]]:
    bridge, policy = factory.build("none")
    yield bridge, policy
    bridge.close()


def update(bridge: Bridge[Policy], policy: Policy, version: int) -> None:
    policy.accumulate(pack(random_groups(groups=2, samples=4, longest=6, seed=version), max_tokens=256))
    with bridge.update_to(version):
        policy.step()


def generate(engine: Engine) -> Sequence[Completion]:
    request = GenerationRequest(PROMPT, SamplingParams(6), n=4, seed=3)
    return engine.generate([request], deadline=Deadline("contract: generation", 120.0))[0]


def difference(policy: Policy, engine: Engine, tokens: Sequence[int] = CANARY) -> float:
    pairs = zip(policy.canary(tokens), engine.canary(tokens).logprobs, strict=True)
    return max(abs(a - b) for a, b in pairs)


def test_after_an_update_the_engine_computes_what_the_trainer_does(built):
    bridge, policy = built
    bridge.sync(0)
    for version in (1, 2, 3):
        before = bridge.engine.canary(CANARY).logprobs
        update(bridge, policy, version)
        other_tokens = tuple(reversed(CANARY))
        assert difference(policy, bridge.engine) < 1e-3
        assert difference(policy, bridge.engine, other_tokens) < 1e-3, "not only on the canary itself"
        after = bridge.engine.canary(CANARY).logprobs
        assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 1e-3, "the update was seen"


def test_versions_advance_with_every_update_and_are_reported(built):
    bridge, policy = built
    assert bridge.sync(4).version == 4
    update(bridge, policy, 5)
    assert bridge.engine.health().version == 5
    assert bridge.last_report is not None
    assert bridge.last_report.version == 5
    assert bridge.last_report.canary_error is not None
    assert 0 <= bridge.last_report.canary_error < 1e-3
    assert bridge.last_report.seconds > 0


def test_generation_after_an_update_uses_the_new_weights(built):
    bridge, policy = built
    bridge.sync(0)
    old = generate(bridge.engine)
    update(bridge, policy, 1)
    new = generate(bridge.engine)
    assert {completion.versions for completion in old} == {(0, 0)}
    assert {completion.versions for completion in new} == {(1, 1)}
    assert [completion.logprobs for completion in new] != [completion.logprobs for completion in old]
    for completion in new:
        expected = policy.canary(PROMPT + completion.token_ids)[len(PROMPT) - 1 :]
        assert completion.logprobs == pytest.approx(expected, abs=1e-3)


def test_an_update_leaves_the_engine_able_to_generate(built):
    bridge, policy = built
    bridge.sync(0)
    update(bridge, policy, 1)
    assert bridge.engine.health().ready
    assert len(generate(bridge.engine)) == 4


def test_a_step_that_fails_transfers_nothing_and_resumes(built):
    bridge, policy = built
    bridge.sync(0)
    update(bridge, policy, 1)
    before = generate(bridge.engine)
    with pytest.raises(TrainingError, match="not finite"), bridge.update_to(2):
        raise TrainingError("the gradient is not finite")
    assert bridge.engine.health().ready
    assert bridge.engine.health().version == 1
    assert generate(bridge.engine) == before
    assert bridge.last_report is not None
    assert bridge.last_report.version == 1
    update(bridge, policy, 2)
    assert difference(policy, bridge.engine) < 1e-3


def refuse(factory: Factory, fault: Fault, match: str) -> None:
    """Somewhere between the first sync and the first update the fault is found, and generation goes on."""
    bridge, policy = factory.build(fault)
    with pytest.raises(StaleWeights, match=match) as caught:
        bridge.sync(0)
        update(bridge, policy, 1)
    assert caught.value.remedy
    assert bridge.engine.health().ready
    bridge.close()


@pytest.mark.parametrize("tensor", TENSORS)
def test_a_single_tensor_that_did_not_arrive_is_stale_weights(factory: Factory, tensor: str):
    refuse(factory, tensor, r"canary logprobs differ from the trainer's by up to [\d.]+ \(allowed 0.001\)")


def test_an_engine_that_keeps_the_weights_before_is_stale_weights(factory: Factory):
    refuse(factory, "nothing arrives", "after the transfer of version 1")


def test_an_engine_whose_version_lags_is_stale_weights(factory: Factory):
    refuse(factory, "the version lags", "weight version 0, the trainer is at 1")


def test_an_engine_of_another_session_is_stale_weights(factory: Factory):
    refuse(factory, "another session answers", "this run works with of another run")


def test_closing_may_be_repeated(built):
    bridge, _ = built
    bridge.close()
    bridge.close()
