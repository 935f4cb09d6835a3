"""Tiny random models and a character tokenizer, built in code: nothing is downloaded."""

from __future__ import annotations

import copy
import io
import pickle
import string
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
VOCAB_SIZE = 3 + len(CHARACTERS)

# Weights larger than those of a fresh model: its distributions would all be alike, and tests on them blind.
_LLAMA_LIKE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2": _LLAMA_LIKE,
    "qwen3": _LLAMA_LIKE | {"head_dim": 8},
    "llama": _LLAMA_LIKE,
    "mistral": _LLAMA_LIKE | {"head_dim": 8, "sliding_window": 4},
    # transformers' SDPA leaves out the softcap of attention scores.
    "gemma2": _LLAMA_LIKE
    | {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8, "attn_implementation": "eager"},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.25},
    "openai-gpt": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.25},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.25},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "initializer_range": 0.25},
    "olmo2": _LLAMA_LIKE,
    # Its decoder layers do not tell their attention what a pass is told.
    "stablelm": _LLAMA_LIKE,
    # Its logits are no linear map of the last hidden state by its head's weights alone.
    "granite": _LLAMA_LIKE | {"logits_scaling": 2.0},
    # Grouped products of experts are of no float64.
    "qwen3_moe": _LLAMA_LIKE
    | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": []}
    | {"experts_implementation": "eager"},
    # Values are narrower than queries and keys.
    "deepseek_v3": _LLAMA_LIKE
    | {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
    | {"num_key_value_heads": 4, "n_group": 2, "topk_group": 1, "n_shared_experts": 1},
    "deepseek_v32": _LLAMA_LIKE
    | {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
    | {"num_key_value_heads": 4, "n_group": 2, "topk_group": 1, "n_shared_experts": 1},
    "gemma3n_text": _LLAMA_LIKE
    | {"head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    | {"intermediate_size": [48, 48], "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE}
    | {"num_kv_shared_layers": 0, "laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0, 0.0]},
    "gpt_oss": _LLAMA_LIKE
    | {"head_dim": 8, "sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.5}
    | {"layer_types": ["sliding_attention", "full_attention"]},
    "llama4_text": _LLAMA_LIKE
    | {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 4, "attention_chunk_size": 4}
    | {"no_rope_layers": [1, 0], "interleave_moe_layer_step": 2}
    | {"layer_types": ["chunked_attention", "full_attention"]},
    "phimoe": _LLAMA_LIKE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral": _LLAMA_LIKE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": _LLAMA_LIKE | {"head_dim": 8},
    "phi3": _LLAMA_LIKE
    | {
        "original_max_position_embeddings": 8,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
            "original_max_position_embeddings": 8,
        },
    },
    "nemotron_h": _LLAMA_LIKE
    | {"head_dim": 8, "layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16}
    | {"ssm_state_size": 8, "n_groups": 1},
    "qwen3_5_text": _LLAMA_LIKE
    | {"head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
    | {"linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "initializer_range": 0.1},
    "falcon_h1": _LLAMA_LIKE
    | {"head_dim": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
    | {"mamba_d_ssm": 64, "mamba_chunk_size": 16},
    "kimi_linear": _LLAMA_LIKE
    | {"linear_num_heads": 4, "linear_head_dim": 8, "linear_conv_kernel_dim": 4, "num_key_value_heads": 4}
    | {"kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
    | {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "layer_types": ["linear_attention", "full_attention"]}
    | {"initializer_range": 0.1},
    "bamba": _LLAMA_LIKE
    | {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1},
    "lfm2": _LLAMA_LIKE | {"layer_types": ["conv", "full_attention"], "block_ff_dim": 48},
    "recurrent_gemma": _LLAMA_LIKE
    | {
        "lru_width": 32,
        "attention_window_size": 32,
        "num_hidden_layers": 3,
        "block_types": ["recurrent", "recurrent", "attention"],
        "w_init_variance_scale": 1.0,
    },
}


class _Writer(pickle.Pickler):
    """Leaves tensors out of what it writes; in their place stands where in ``tensors`` they are, each of them once."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, obj: object) -> int | None:
        if not isinstance(obj, torch.Tensor):
            return None
        if id(obj) not in self._places:
            self._places[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._places[id(obj)]


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]


class _Kept:
    """Written once and read anew for each test that asks: ``copy.deepcopy`` takes five times as long.

    Its tensors are copied beside what is written, so that what is tied stays tied.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        file = io.BytesIO()
        writer = _Writer(file)
        writer.dump(model)
        self._written, self._tensors = file.getvalue(), writer.tensors

    def copy(self) -> PreTrainedModel:
        return _Reader(io.BytesIO(self._written), copy.deepcopy(self._tensors)).load()


_BUILT: dict[str, _Kept] = {}


def tiny_model(architecture: str = "qwen2", *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A causal language model of two or three layers in float32 on the CPU, in evaluation mode.

    Args:
        architecture: transformers' ``model_type``, one of those configured here.
        seed: equal seeds give equal weights; the global random state is left alone.
        overrides: fields of the model's configuration.
    """
    key = repr((architecture, seed, sorted(overrides.items())))
    if key not in _BUILT:
        _BUILT[key] = _Kept(_build(architecture, seed=seed, **overrides))
    return _BUILT[key].copy()


def _build(architecture: str, *, seed: int, **overrides: Any) -> PreTrainedModel:
    special = {"pad_token_id": PAD_ID, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
    fields = {"vocab_size": VOCAB_SIZE} | special | _CONFIGS[architecture] | overrides
    config = AutoConfig.for_model(architecture, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config).eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A token per character of printable ASCII, and the three special tokens."""
    vocabulary = {token: i for i, token in enumerate([PAD, BOS, EOS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS, model_max_length=128
    )
