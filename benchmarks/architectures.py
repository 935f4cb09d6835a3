"""The architectures that several benchmarks measure, as fields of transformers' configurations."""

from __future__ import annotations

from typing import Any

QWEN2_5_1_5B: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2, "intermediate_size": 8960, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
LLAMA_3_1_8B: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}  # fmt: skip
QWEN3_30B_A3B: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
PEAK_BF16_FLOPS = 989e12  # H100 and H200, dense, by the vendor's datasheet
