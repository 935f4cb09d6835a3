"""The pass on a short model while the engine starts, on a real GPU. Not part of `make test`.

PYTHONPATH=src python -m pytest tests/gpu
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from lachesis.config.schema import LachesisConfig
from lachesis.run.parts import build_policy, pack_batch
from lachesis.run.warm_up import warm_up
from tests.tiny import tiny_model, tiny_tokenizer
from tests.unit.train.model.test_forward import random_groups

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_the_first_step_compiles_nothing(tmp_path: Path, adapter: str):
    shape = {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 2048}
    shape["vocab_size"] = 4096
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
    groups = random_groups(groups=5, samples=6, longest=90)
    policy.accumulate(pack_batch(groups, config=config, policy=policy))
    assert dict(counters["stats"]) == compiled
