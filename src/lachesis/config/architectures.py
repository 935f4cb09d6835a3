"""Shapes of well-known models by their exact hub ids, for planning if the hub does not answer.

Each has the memory-related fields of the ``config.json`` that its authors published. ``tests/unit/config`` compares
the numbers of parameters with those of the published weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_QWEN25: Mapping[str, Any] = {"model_type": "qwen2", "vocab_size": 151936, "max_position_embeddings": 32768}
_QWEN25_WIDE: Mapping[str, Any] = {**_QWEN25, "vocab_size": 152064, "num_key_value_heads": 8}
_QWEN3: Mapping[str, Any] = {
    "model_type": "qwen3", "vocab_size": 151936, "max_position_embeddings": 40960, "head_dim": 128,
    "num_key_value_heads": 8,
}  # fmt: skip
_QWEN3_MOE: Mapping[str, Any] = {
    **_QWEN3, "model_type": "qwen3_moe", "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
}  # fmt: skip
_LLAMA3: Mapping[str, Any] = {
    "model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072, "num_key_value_heads": 8,
}  # fmt: skip
_TIED: Mapping[str, Any] = {"tie_word_embeddings": True}


def _wide(hidden: int, layers: int, heads: int, feed_forward: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": feed_forward,
    }


_BASES: Mapping[str, Mapping[str, Any]] = {
    "Qwen/Qwen2.5-0.5B": {**_QWEN25, **_wide(896, 24, 14, 4864), "num_key_value_heads": 2, **_TIED},
    "Qwen/Qwen2.5-1.5B": {**_QWEN25, **_wide(1536, 28, 12, 8960), "num_key_value_heads": 2, **_TIED},
    "Qwen/Qwen2.5-3B": {**_QWEN25, **_wide(2048, 36, 16, 11008), "num_key_value_heads": 2, **_TIED},
    "Qwen/Qwen2.5-7B": {**_QWEN25_WIDE, **_wide(3584, 28, 28, 18944), "num_key_value_heads": 4},
    "Qwen/Qwen2.5-14B": {**_QWEN25_WIDE, **_wide(5120, 48, 40, 13824)},
    "Qwen/Qwen2.5-32B": {**_QWEN25_WIDE, **_wide(5120, 64, 40, 27648)},
    "Qwen/Qwen2.5-72B": {**_QWEN25_WIDE, **_wide(8192, 80, 64, 29568)},
    "Qwen/Qwen3-0.6B": {**_QWEN3, **_wide(1024, 28, 16, 3072), **_TIED},
    "Qwen/Qwen3-1.7B": {**_QWEN3, **_wide(2048, 28, 16, 6144), **_TIED},
    "Qwen/Qwen3-4B": {**_QWEN3, **_wide(2560, 36, 32, 9728), **_TIED},
    "Qwen/Qwen3-8B": {**_QWEN3, **_wide(4096, 36, 32, 12288)},
    "Qwen/Qwen3-14B": {**_QWEN3, **_wide(5120, 40, 40, 17408)},
    "Qwen/Qwen3-32B": {**_QWEN3, **_wide(5120, 64, 64, 25600)},
    "Qwen/Qwen3-30B-A3B": {**_QWEN3_MOE, **_wide(2048, 48, 32, 6144), "moe_intermediate_size": 768},
    "Qwen/Qwen3-235B-A22B": {**_QWEN3_MOE, **_wide(4096, 94, 64, 12288), "moe_intermediate_size": 1536},
    "meta-llama/Llama-3.2-1B": {**_LLAMA3, **_wide(2048, 16, 32, 8192), "head_dim": 64, **_TIED},
    "meta-llama/Llama-3.2-3B": {**_LLAMA3, **_wide(3072, 28, 24, 8192), **_TIED},
    "meta-llama/Llama-3.1-8B": {**_LLAMA3, **_wide(4096, 32, 32, 14336)},
    "meta-llama/Llama-3.1-70B": {**_LLAMA3, **_wide(8192, 80, 64, 28672)},
    # Of Qwen2.5-Math-1.5B, whose head it unties.
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": {
        **_QWEN25, **_wide(1536, 28, 12, 8960), "num_key_value_heads": 2, "max_position_embeddings": 131072,
    },
    "mistralai/Mistral-Small-24B-Base-2501": {
        "model_type": "mistral", **_wide(5120, 40, 32, 32768), "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 131072, "max_position_embeddings": 32768,
    },
}  # fmt: skip
# The same shape under further names: what comes after training has another context at most.
_ALSO: Mapping[str, str] = {
    **{f"{name}-Instruct": name for name in _BASES if name.startswith(("Qwen/Qwen2.5", "meta-llama"))},
    **{f"{name}-Base": name for name in _BASES if name.startswith("Qwen/Qwen3") and "235B" not in name},
    "mistralai/Mistral-Small-24B-Instruct-2501": "mistralai/Mistral-Small-24B-Base-2501",
    "meta-llama/Llama-3.3-70B-Instruct": "meta-llama/Llama-3.1-70B",
    "NousResearch/Hermes-3-Llama-3.1-8B": "meta-llama/Llama-3.1-8B",
    **{f"deepseek-ai/DeepSeek-R1-Distill-Qwen-{size}": f"Qwen/Qwen2.5-{size}" for size in ("7B", "14B", "32B")},
    **{f"deepseek-ai/DeepSeek-R1-Distill-Llama-{size}": f"meta-llama/Llama-3.1-{size}" for size in ("8B", "70B")},
    "Qwen/Qwen2.5-Math-1.5B": "Qwen/Qwen2.5-1.5B",
    "Qwen/Qwen2.5-Math-7B": "Qwen/Qwen2.5-7B",
}


def known_architecture(model: str) -> dict[str, Any] | None:
    """Return the memory-related fields of a model's ``config.json``; None if its exact name is unknown."""
    found = _BASES.get(_ALSO.get(model, model))
    return None if found is None else {"dtype": "bfloat16", **found}
