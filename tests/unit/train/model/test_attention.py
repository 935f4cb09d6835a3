"""How segments are laid side by side on a CPU: all of them, and with little padding."""

from __future__ import annotations

import pytest
import torch

from lachesis.train.batch import pack
from lachesis.train.model import attention
from lachesis.train.model.attention import plan_buckets
from lachesis.train.model.forward import ForwardPlan, target_logprobs
from tests.tiny import tiny_model
from tests.unit.train.model.test_forward import random_groups


@pytest.mark.parametrize(("groups", "samples", "longest"), [(64, 4, 6), (12, 8, 40), (3, 2, 8)])
def test_padding_is_little_where_some_segments_have_a_prompt_of_their_own(groups: int, samples: int, longest: int):
    """The first completion of a prompt has it among its queries, others see it: as many keys with fewer queries."""
    (micro,) = pack(random_groups(groups=groups, samples=samples, longest=longest), max_tokens=1 << 20).micro_batches
    plan = plan_buckets(micro)
    laid = torch.cat([bucket.q_index for bucket in plan.buckets])
    assert torch.equal(laid[plan.unpad], torch.arange(micro.num_inputs)), "each token is a query of some bucket"
    real = int((micro.cu_seq_q.diff() * micro.cu_seq_k.diff()).sum())
    padded = sum(bucket.q_index.numel() * bucket.k_index.numel() // bucket.size for bucket in plan.buckets)
    assert padded < 2.2 * real + (1 << 12)


def test_compiled_layers_are_not_compiled_anew_for_another_number_of_buckets():
    torch._dynamo.reset()
    model = tiny_model("qwen2")
    attention.install(model)
    compiled = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        compiled.append(graph)
        return graph.forward

    for layer in model.model.layers:
        layer.compile(dynamic=True, backend=backend)
    buckets, graphs = [], []
    for groups, samples, longest in ((3, 3, 20), (6, 4, 60), (2, 8, 90)):
        drawn = random_groups(groups=groups, samples=samples, longest=longest)
        (micro,) = pack(drawn, max_tokens=1 << 20).micro_batches
        buckets.append(len(plan_buckets(micro).buckets))
        found = target_logprobs(model, micro, plan=ForwardPlan(attention="bucketed", head="chunked"))
        found.logprobs.sum().backward()
        graphs.append(len(compiled))
    assert len(set(buckets)) == 3
    assert 0 < graphs[0] == graphs[1] == graphs[2]


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_one_compilation_serves_all_layers(architecture: str):
    """What is read of a layer must not tell it from the others: torch compiles eight, and runs the rest as they are."""
    (micro,) = pack(random_groups(groups=3, samples=3, longest=20), max_tokens=1 << 20).micro_batches
    graphs = []
    for layers in (1, 3):
        torch._dynamo.reset()
        model = tiny_model(architecture, num_hidden_layers=layers)
        attention.install(model)
        compiled = []

        def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], compiled: list[object] = compiled):
            compiled.append(graph)
            return graph.forward

        for layer in model.model.layers:
            layer.compile(dynamic=True, backend=backend)
        target_logprobs(model, micro, plan=ForwardPlan(attention="bucketed", head="chunked"))
        graphs.append(len(compiled))
    assert 0 < graphs[0] == graphs[1]
