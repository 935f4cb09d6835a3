"""Packed training and the embedded engine on a real GPU. Not part of `make test`: run where there is one.

PYTHONPATH=src python -m pytest tests/gpu
"""

from __future__ import annotations

import warnings

import pytest
import torch

from lachesis.common.deadline import Deadline
from lachesis.common.types import GenerationRequest, Sample, SamplingParams
from lachesis.engines.embedded.engine import EmbeddedEngine
from lachesis.train.batch import pack
from lachesis.train.model.attention import plan_buckets
from lachesis.train.model.forward import plan_forward, target_logprobs
from lachesis.train.model.loading import LoadedModel
from tests.losses import loss_options
from tests.tiny import EOS_ID, PAD_ID, tiny_model, tiny_tokenizer
from tests.unit.train.model.test_forward import random_groups
from tests.unit.train.test_policy import make_policy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def reference(model, sample: Sample) -> torch.Tensor:
    """Logprobs of a sample by a plain pass of its own, in the model's dtype."""
    ids = torch.tensor([sample.prompt_ids + sample.completion_ids], device="cuda")
    log_p = (model(input_ids=ids, use_cache=False).logits[0].float() / sample.temperature).log_softmax(-1)
    start = len(sample.prompt_ids)
    return log_p[start - 1 : -1].gather(1, ids[0, start:, None]).squeeze(1)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "mistral"])
@pytest.mark.parametrize(
    ("dtype", "attention", "tolerance"), [("bfloat16", "flash", 0.08), ("float32", "bucketed", 1e-4)]
)
def test_packed_logprobs_and_gradients(architecture, dtype, attention, tolerance):
    torch.backends.cuda.matmul.allow_tf32 = False
    model = tiny_model(architecture, initializer_range=0.1).to("cuda", getattr(torch, dtype))
    groups = random_groups(groups=4, samples=4, longest=20)
    expected = {(s.prompt_ids, s.completion_ids): reference(model, s) for g in groups for s in g.samples}
    plan = plan_forward(model, packing="packed")
    assert plan.attention == attention
    (micro,) = (m.to(torch.device("cuda")) for m in pack(groups, max_tokens=1 << 20).micro_batches)
    found = target_logprobs(model, micro, plan=plan).logprobs
    found = found if micro.expand is None else found[micro.expand]
    targets = micro.targets if micro.expand is None else micro.targets[micro.expand]
    ours = torch.autograd.grad(found.sum(), model.get_input_embeddings().weight, retain_graph=True)[0]
    theirs = torch.autograd.grad(
        sum(expected[s.prompt_ids, s.completion_ids].sum() for g in groups for s in g.samples),
        model.get_input_embeddings().weight,
    )[0]
    for row in range(micro.advantages.numel()):
        ids = tuple(targets[micro.row == row].tolist())
        errors = [float((found[micro.row == row] - v).abs().max()) for (_, c), v in expected.items() if c == ids]
        assert min(errors) < tolerance
    assert float((ours.float() - theirs.float()).norm() / theirs.float().norm()) < tolerance


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_engine_logprobs_are_those_of_the_trainer(dtype):
    model = tiny_model("qwen2", initializer_range=0.1).to("cuda", getattr(torch, dtype)).eval()
    plan_forward(model, packing="packed")
    engine = EmbeddedEngine(model, eos_token_ids=[EOS_ID], pad_token_id=PAD_ID, max_batch_size=64, max_context=128)
    params = SamplingParams(max_tokens=24, temperature=0.7)
    requests = [GenerationRequest(tuple(range(5, 8 + i)), params, n=4, seed=i) for i in range(4)]
    for request, answer in zip(requests, engine.generate(requests, deadline=Deadline("test", 60)), strict=True):
        for completion in answer:
            sample = Sample(
                request.prompt_ids,
                completion.token_ids,
                completion.logprobs,
                completion.finish_reason,
                completion.versions,
                temperature=0.7,
            )
            error = (reference(model, sample) - torch.tensor(completion.logprobs, device="cuda")).abs().mean()
            assert float(error) < (0.02 if dtype == "bfloat16" else 1e-4)


def test_a_plan_waits_for_what_a_busy_gpu_has_not_sent():
    """The segments of a micro-batch are laid out on the CPU: numbers that had not arrived would be any numbers."""
    (micro,) = pack(random_groups(groups=4, samples=4, longest=20), max_tokens=1 << 20).micro_batches
    expected = plan_buckets(micro)
    for _ in range(20):
        torch.cuda._sleep(20_000_000)
        found = plan_buckets(micro.to(torch.device("cuda")))
        assert torch.equal(found.unpad.cpu(), expected.unpad)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_nothing_waits_for_the_gpu_between_passes(loss_type: str):
    """A number that is read off it empties its queue, and the next pass is launched while it has nothing to do."""
    transformer = tiny_model("qwen2").to("cuda", torch.bfloat16)
    loaded = LoadedModel(model=transformer, transformer=transformer, tokenizer=tiny_tokenizer())
    policy = make_policy(options=loss_options(loss_type=loss_type), loaded=loaded)
    groups, waits = random_groups(groups=6, samples=4, longest=20), []
    for max_tokens in (100, 40):
        batch = pack(groups, max_tokens=max_tokens)
        policy.accumulate(batch)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            policy.accumulate(batch)
            torch.cuda.set_sync_debug_mode("default")
        waits.append((len(batch.micro_batches), sum("called a synchronizing" in str(one.message) for one in told)))
    (few, once), (many, again) = waits
    assert few < many
    assert once == again <= 1, "the metrics of all passes are fetched together"
