"""The pass on a short model while the engine starts, on a real GPU. Not part of `make test`.

PYTHONPATH=src python -m pytest tests/gpu
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from lachesis.config.schema import LachesisConfig
from lachesis.run.parts import build_policy
from lachesis.run.warm_up import warm_up
from lachesis.train.pack import pack_batch
from tests.tiny import tiny_model, tiny_tokenizer
from tests.unit.train.model.test_forward import random_groups

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


SMALL = {"hidden_size": 128, "intermediate_size": 256}
# So wide that inductor would draw lines at 3,413 and 4,096 tokens, and make a graph for each side of them.
WIDE = {"hidden_size": 1536, "intermediate_size": 512, "num_attention_heads": 12, "num_key_value_heads": 2}
SIZES = ((5, 90), (12, 90), (22, 60), (40, 60))  # groups and longest sequences: 1,300, 2,700, 3,600 and 6,900 tokens


@pytest.mark.parametrize("adapter", ["none", "lora"])
@pytest.mark.parametrize("widths", [SMALL, WIDE], ids=["small", "wide"])
def test_no_step_compiles_anything(tmp_path: Path, widths: dict[str, int], adapter: str):
    shape = {"num_hidden_layers": 4, "vocab_size": 4096, "max_position_embeddings": 2048, **widths}
    tiny_model("qwen2", **shape).to(torch.bfloat16).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    tree = {"run": {"steps": 1}, "model": {"path": str(tmp_path), "compile": "on"}, "adapter": {"kind": adapter}}
    config = LachesisConfig.model_validate(tree)
    torch._dynamo.reset()
    counters.clear()
    random = torch.cuda.get_rng_state()
    warm_up(config)
    assert torch.equal(torch.cuda.get_rng_state(), random)
    compiled = dict(counters["stats"])
    assert compiled["unique_graphs"] > 0
    policy = build_policy(config)
    for number, longest in SIZES:
        groups = random_groups(groups=number, samples=6, longest=longest)
        policy.accumulate(pack_batch(groups, config=config, policy=policy))
        assert dict(counters["stats"]) == compiled
