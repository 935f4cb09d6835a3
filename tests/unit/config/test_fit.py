"""Which changes make trainer and engine fit on a card: the documents' sizes of models and of cards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lachesis.config.document import Document, apply_overrides
from lachesis.config.fit import GB, fit, fit_lines, needed
from lachesis.config.load import validate
from lachesis.config.plan import plan
from lachesis.config.schema import LachesisConfig

# Llama 3.1 8B, Qwen2.5-14B, Mistral Small 24B.
SHAPES: dict[str, dict[str, Any]] = {
    "8B": {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
    "14B": {"hidden_size": 5120, "num_hidden_layers": 48, "intermediate_size": 13824, "num_attention_heads": 40,
            "num_key_value_heads": 8, "vocab_size": 152064},
    "24B": {"hidden_size": 5120, "num_hidden_layers": 40, "intermediate_size": 32768, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072},
}  # fmt: skip


def configured(directory: Path, size: str) -> dict[str, Any]:
    model = directory / size
    model.mkdir()
    facts = {"model_type": "llama", "max_position_embeddings": 8192, "torch_dtype": "bfloat16"}
    (model / "config.json").write_text(json.dumps(SHAPES[size] | facts))
    return {
        "run": {"steps": 10},
        "model": {"path": str(model)},
        "data": {"path": "p.jsonl", "max_prompt_length": 256},
        "rewards": {"functions": ["r.f"]},
        "sampling": {"num_generations": 4, "max_completion_length": 256},
        "engine": {"kind": "vllm"},
        "bridge": {"kind": "shared_vllm"},
    }


@pytest.mark.parametrize(
    ("size", "card", "wanted"),
    [
        ("8B", 24, "share_base"),
        ("8B", 40, "adamw_cpu"),
        ("14B", 24, "nf4"),
        ("14B", 40, "share_base"),
        ("24B", 24, "nf4"),
        ("24B", 40, "nf4"),
        ("8B", 192, ""),
    ],
)
def test_what_is_proposed_is_a_configuration_that_fits(tmp_path: Path, size: str, card: float, wanted: str):
    data = configured(tmp_path, size)
    found = fit(LachesisConfig.model_validate(data), card_gb=card)
    assert found is not None and found.bytes <= card * GB
    words = found.words()
    assert wanted in " ".join(words) and bool(words) == bool(wanted)
    document = Document(name="the proposal", data=data)
    apply_overrides(document, words)
    assert needed(plan(validate(document), device="cuda")) == found.bytes


def test_the_cheapest_change_comes_first(tmp_path: Path):
    config = LachesisConfig.model_validate(configured(tmp_path, "8B"))
    kinds = []
    for card in (24, 80, 100, 192):
        found = fit(config, card_gb=card)
        assert found is not None
        kinds.append(found.bytes)
    assert kinds == sorted(kinds), "a smaller card never gets what takes more"


def test_where_nothing_fits_it_says_so(tmp_path: Path):
    config = LachesisConfig.model_validate(configured(tmp_path, "24B"))
    assert fit(config, card_gb=8) is None
    assert "nothing tried fits on 8 GB" in fit_lines(None, card_gb=8)[0]
