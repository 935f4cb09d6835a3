"""Which models train packed with shared prompts, in full and with LoRA, and how exactly: writes docs/models.md.

    PYTHONPATH=src python benchmarks/models.py [--only NAME ...] [--page docs/models.md --table FILE] [--tiny]

Each architecture of transformers is made tiny with random weights in float32, with windows and chunks shorter than the
sequences. Logprobs and the gradient of every parameter are compared with transformers' own model, run on one sequence
at a time. ``--tiny`` takes a dozen of them. Needs a CPU, and about a minute.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import vision_models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lachesis.common.errors import LachesisError, first_line
from lachesis.common.types import Group, Prompt, Sample, VersionSpan
from lachesis.config.schema import LoraAdapterConfig
from lachesis.train.batch import pack
from lachesis.train.model.forward import ForwardPlan, loss_token_logprobs, plan_forward
from lachesis.train.model.lora import add_lora
from lachesis.train.model.repeatable import make_repeatable

VOCABULARY = 96
_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.1,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_HEAD: dict[str, Any] = {"head_dim": 8}
_WINDOW = _HEAD | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LOCAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
_SPARSE = _LATENT | _ROUTED | {"head_dim": 8, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 24}
_MIXED = {"layer_types": ["linear_attention", "full_attention"]}
_DELTA = _HEAD | _MIXED | {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
_GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "n_inner": 48}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": _HEAD | {"sliding_window": 8}, "ministral": _WINDOW, "mixtral": _LOCAL,
    "qwen2": {}, "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 16}, "qwen3": _HEAD,
    "qwen3_moe": _HEAD | _EXPERTS, "qwen3_next": _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen3_5_text": _DELTA, "qwen3_5_moe_text": _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 16},
    "gemma": _HEAD, "gemma2": _WINDOW | {"query_pre_attn_scalar": 8}, "gemma3_text": _WINDOW,
    "vaultgemma": _WINDOW | {"query_pre_attn_scalar": 8}, "phi": {}, "phi3": {"sliding_window": 8}, "phimoe": _LOCAL,
    "gpt2": _GPT, "gpt_neox": {}, "gpt_bigcode": _GPT, "gptj": _GPT | {"rotary_dim": 4}, "gpt_neo":
    {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32}, "bloom": {"n_layer": 2, "n_head": 4}, "mpt":
    {"d_model": 32, "n_heads": 4, "n_layers": 2}, "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "olmo": {}, "olmo2": {}, "olmo3": _WINDOW, "olmoe": _EXPERTS, "flex_olmo": _EXPERTS,
    "olmo_hybrid": _DELTA | {"linear_num_key_heads": 4}, "smollm3": {"no_rope_layers": [1, 0]},
    "granite": {"logits_scaling": 2.0}, "granitemoe": _LOCAL, "granitemoehybrid": _MAMBA | _LOCAL
    | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 48}, "starcoder2": {"sliding_window": 8},
    "cohere": {}, "cohere2": _WINDOW, "glm": _HEAD, "glm4": _HEAD, "glm4_moe": _HEAD | _ROUTED,
    "ernie4_5": _HEAD, "seed_oss": _HEAD, "exaone4": _WINDOW | {"sliding_window_pattern": 2},
    "hunyuan_v1_dense": _HEAD, "apertus": {}, "arcee": _HEAD, "dots1": _HEAD | _ROUTED, "persimmon": {},
    "helium": _HEAD, "nanochat": {}, "bitnet": {}, "stablelm": {}, "nemotron": {}, "minimax_m2": _HEAD | _LOCAL,
    "deepseek_v2": _LATENT | _ROUTED, "deepseek_v3": _LATENT | _ROUTED | {"n_group": 2}, "minicpm3": _LATENT,
    "youtu": _LATENT, "glm4_moe_lite": _LATENT | _ROUTED, "gpt_oss": _WINDOW | _LOCAL, "llama4_text": _HEAD | _LOCAL
    | {"intermediate_size_mlp": 48, "attention_chunk_size": 8, "no_rope_layers": [1, 0], "interleave_moe_layer_step": 2,
       "layer_types": ["chunked_attention", "full_attention"]},
    "kimi_linear": _LATENT | _ROUTED | _MIXED | {"q_lora_rank": None, "linear_num_heads": 4, "linear_head_dim": 8,
                                                 "linear_conv_kernel_dim": 4},
    "nemotron_h": _HEAD | {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16,
                           "ssm_state_size": 8, "n_groups": 1},
    "falcon_h1": _HEAD | _MAMBA | {"mamba_d_ssm": 64}, "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}, "mamba": {"state_size": 8},
    "falcon_mamba": {"state_size": 8}, "zamba2": {"num_hidden_layers": 3, "mamba_d_state": 8, "mamba_ngroups": 1,
    "n_mamba_heads": 4, "layers_block_type": ["mamba", "hybrid", "mamba"], "num_mem_blocks": 1, "adapter_rank": 4,
    "attention_head_dim": 16}, "jamba": {"mamba_d_state": 8, "mamba_dt_rank": 4, "num_experts": 1,
    "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts_per_tok": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_ff_dim": 48}, "lfm2_moe": _EXPERTS
    | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}, "recurrent_gemma":
    {"lru_width": 32, "num_hidden_layers": 3, "block_types": ["recurrent", "recurrent", "attention"],
     "attention_window_size": 8}, "rwkv": {"attention_hidden_size": 32}, "minimax": _HEAD | _LOCAL | _MIXED,
    "gemma4_text": _WINDOW | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY,
    "num_kv_shared_layers": 0}, "ministral3": _HEAD, "granitemoeshared": _LOCAL | {"shared_intermediate_size": 48},
    "ernie4_5_moe": _HEAD | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16,
                             "moe_layer_start_index": 1}, "hunyuan_v1_moe": _HEAD | {"num_experts": 4, "moe_topk": 2},
    "solar_open": _HEAD | _ROUTED, "diffllama": {}, "modernbert-decoder": {"local_attention": 8,
    "num_key_value_heads": 4}, "afmoe": _WINDOW | _EXPERTS | {"num_dense_layers": 1, "num_shared_experts": 1},
    "hyperclovax": {}, "laguna": _HEAD | _EXPERTS, "jais2": {}, "zaya": {}, "codegen": _GPT | {"rotary_dim": 4},
    "doge": {}, "dbrx": {"d_model": 32, "n_heads": 4, "n_layers": 2, "ffn_config": {"ffn_hidden_size": 32,
    "moe_num_experts": 4, "moe_top_k": 2, "moe_jitter_eps": 0.1}, "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4,
    "clip_qkv": 8}}, "mimo_v2_flash": _HEAD | _ROUTED, "gpt_neox_japanese": {}, "xglm": {"d_model": 32, "ffn_dim": 48,
    "num_layers": 2, "attention_heads": 4}, "biogpt": {}, "jetmoe": {"num_key_value_heads": 2, "kv_channels": 8,
    "num_local_experts": 4}, "cwm": _WINDOW, "exaone_moe": _HEAD | _ROUTED, "xlstm": {"embedding_dim": 32,
    "num_heads": 4, "num_blocks": 2, "head_dim": 8}, "axk1": _LATENT | _ROUTED, "hy_v3": {},
    "aria_text": _HEAD | {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}, "axk2": _SPARSE
    | {"gated_norm_rank": 4, "n_group": None, "topk_group": None}, "cohere2_moe": _WINDOW | _EXPERTS, "ctrl":
    {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 48, "n_positions": 512}, "deepseek_v32": _SPARSE, "glm_moe_dsa":
    _SPARSE | {"qk_head_dim": 16}, "gemma3n_text": _WINDOW | {"intermediate_size": [48, 48], "laurel_rank": 4,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 0,
    "altup_num_inputs": 2, "activation_sparsity_pattern": [0.9, 0.0]}, "gemma4_unified_text": _WINDOW
    | {"per_layer_config": {}}, "granite_swa": {"sliding_window": 8}, "granitemoe_swa": _LOCAL
    | {"sliding_window": 8, "shared_intermediate_size": 48}, "hrm_text": _HEAD | {"num_hidden_layers": 8,
    "num_layers_per_stack": 1, "H_cycles": 2, "L_cycles": 2, "L_bp_cycles": [1]}, "hy_v4": _SPARSE
    | {"hc_mult": 2, "qk_head_dim": 16}, "inkling_text": _HEAD | {"swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2, "swa_head_dim": 8, "sliding_window_size": 8, "d_rel": 4, "rel_extent": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 16},
    "longcat_flash": _LATENT | {"num_layers": 2, "head_dim": 8, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16,
    "moe_topk": 2, "n_routed_experts": 4, "zero_expert_num": 2, "qk_head_dim": 16}, "mellum": _WINDOW | _LOCAL
    | {"moe_intermediate_size": 16}, "minimax_m3_vl_text": _HEAD | _LOCAL | {"dense_intermediate_size": 48,
    "shared_intermediate_size": 16, "rotary_dim": 4, "index_n_heads": 2, "index_head_dim": 8, "index_block_size": 8,
    "index_topk_blocks": 2}, "openai-gpt": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "qwen4_exp_text": _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 16, "hc_count": 2, "hc_lowrank": 8,
    "ple_embed_dim": 16, "heads_per_ngram": 2, "ngram_vocab_size_base": 101, "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 2, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 512,
    "indexer_compress_ratio": 4},
}  # fmt: skip
# One of each kind of layer.
A_DOZEN = (
    "qwen3", "gemma3_text", "gpt2", "olmo3", "stablelm", "deepseek_v3", "gpt_oss", "llama4_text", "qwen3_5_text",
    "nemotron_h", "lfm2", "mamba",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """What was found of a model: how it is run, and the largest errors of logprobs (nats) and gradients (relative)."""

    name: str
    way: str
    error: str
    gradients: str
    lora: str

    def __str__(self) -> str:
        return f"| {self.name} | {self.way} | {self.error} | {self.gradients} | {self.lora} |"


@dataclass(frozen=True, slots=True)
class SeenRow:
    """What was found of a model for images: the largest errors of engine and trainer on them, in nats."""

    name: str
    engine: str
    trainer: str

    def __str__(self) -> str:
        return f"| {self.name} | {self.engine} | {self.trainer} |"


# Those that tests/contracts/test_vllm_images.py has vLLM serve.
SERVED = ("idefics3",)
# A gradient that is so much smaller than the largest one of the model counts as so large.
_LEAST = 1e-4

PAGE = """\
# Models

<!-- Written by benchmarks/models.py. -->

Lachesis trains any causal language model of transformers. At the start of a run each model is probed: its own logprobs,
one sequence at a time, have to come out of the fastest way of running it, or a slower way is taken. The run says which
one and why in its first lines, and the report under *Configuration*.

*Packed* is one stream of tokens without padding, in which a group's prompt is computed once; *padded* is a row for each
sequence.

Models for images and text are trained on text, or on text and images ([images](data-and-rewards.md#images)), then on
padded rows. What they have beside the language model is frozen, and saved as it is under the checkpoint's own names;
`model.vision: trained` trains it too. A model with images that is not below is tried as it is; `logprob_diff_max` shows
whether engine and trainer agree.

These model types of transformers {version} were compared, as tiny models of random weights in float32 on a CPU, with
transformers' own computation of one sequence at a time. [The table](../benchmarks/raw/models.md) has the largest
difference of each in logprobs, in gradients, and in logprobs with an adapter on `all-linear`.

{lists}

{vision}
"""
TABLE = """\
# Models, compared

<!-- Written by benchmarks/models.py. -->

Tiny models of random weights in float32 on a CPU, with transformers {version}. *Logprobs* is the largest difference,
in nats, from transformers' own, one sequence at a time. *Gradients* is the largest difference of any parameter's
gradient, relative to its size. *LoRA* is the same as *logprobs* for an adapter on `all-linear`.

| model type | trains | logprobs | gradients | LoRA |
|---|---|---|---|---|
"""
VISION = """
With images of random pixels: *engine* is the largest difference of the embedded engine's logprobs from transformers',
*trainer* that of the trainer's from the engine's.

| model type | engine | trainer |
|---|---|---|
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a dozen of them")
    parser.add_argument("--only", nargs="+", choices=[*ARCHITECTURES, *vision_models.ARCHITECTURES], metavar="NAME")
    parser.add_argument("--page", type=Path, help="file to write the page to")
    parser.add_argument("--table", type=Path, help="file to write the table to")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows: list[Row] = []
    seen: list[SeenRow] = []
    chosen = options.only or (A_DOZEN if options.tiny else [*ARCHITECTURES, *vision_models.ARCHITECTURES])
    for name in chosen:
        found = row(name) if name in ARCHITECTURES else seen_row(name)
        rows += [found] if isinstance(found, Row) else []
        seen += [found] if isinstance(found, SeenRow) else []
        sys.stdout.write(f"{found}\n")
        sys.stdout.flush()
    rows.sort(key=lambda found: found.name)
    seen.sort(key=lambda found: found.name)
    version = transformers.__version__
    if options.page:
        options.page.write_text(PAGE.format(version=version, lists=lists(rows), vision=vision_list(seen)))
    if options.table:
        tables = (TABLE.format(version=version), *(f"{line}\n" for line in rows))
        options.table.write_text("".join((*tables, VISION, *(f"{line}\n" for line in seen))))


def lists(rows: Sequence[Row]) -> str:
    """Return the names of the models that train packed, padded and not at all."""
    ways = {"Packed": "packed", "Padded": "padded", "Not": "not:"}
    named = {title: [row.name for row in rows if row.way.startswith(way)] for title, way in ways.items()}
    parts = [f"**{title}** ({len(names)}): {', '.join(names)}." for title, names in named.items() if names]
    return "\n\n".join(map(filled, parts))


def vision_list(rows: Sequence[SeenRow]) -> str:
    """Return the names of the models that train with images, and which of them vLLM was seen to serve them to."""
    names = [row.name for row in rows if not row.engine.startswith("not")]
    compared = f"With vLLM's engine too, compared on its CPU build: {', '.join(SERVED)}."
    return filled(f"**With images**, padded ({len(names)}): {', '.join(names)}. {compared}")


def filled(text: str) -> str:
    return textwrap.fill(text, 120, break_on_hyphens=False)


def row(name: str) -> Row:
    try:
        way, error, gradients = compared(model := tiny(name))
        model.zero_grad()
    except (LachesisError, ValueError, TypeError, AttributeError, LookupError, RuntimeError) as failure:
        return Row(name, f"not: {first_line(failure)[:120]}", "", "", "")
    return Row(name, way, f"{error:.0e}", f"{gradients:.0e}", with_lora(name))


def seen_row(name: str) -> SeenRow:
    """Compare a model on prompts with images."""
    try:
        model = vision_models.tiny(name)
        groups = vision_models.sampled(model, vision_models.prompts(name))
        engine, trainer = (
            vision_models.error_of_engine(model, groups), vision_models.error_of_trainer(model, groups),
        )  # fmt: skip
    except (LachesisError, ValueError, TypeError, AttributeError, LookupError, RuntimeError) as failure:
        return SeenRow(name, f"not: {first_line(failure)[:120]}", "")
    return SeenRow(name, f"{engine:.0e}", f"{trainer:.0e}")


def with_lora(name: str) -> str:
    model = tiny(name)
    try:
        adapted = add_lora(model, LoraAdapterConfig(r=4, alpha=8))
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.normal_(std=0.1)
        return f"{compared(model)[1]:.0e}"
    except (LachesisError, ValueError, TypeError, AttributeError, LookupError, RuntimeError) as failure:
        return f"not: {first_line(failure)[:120]}"


def tiny(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **_BASE | ARCHITECTURES[name])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    make_repeatable(model)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1 and not parameter_name.endswith(("A_log", "dt_bias")):  # of norms, biases, sinks
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def compared(model: PreTrainedModel) -> tuple[str, float, float]:
    """Return how a model is run, and the largest errors of its logprobs and of its gradients."""
    plan = plan_forward(model, packing="auto")
    groups = [*drawn_groups()]
    theirs = [plain_logprobs(model, sample) for group in groups for sample in group.samples]
    of_theirs = gradients(model, sum(weighed(values) for values in theirs))
    ours = [*logprobs_of(model, groups, plan=plan)]
    of_ours = gradients(model, sum(weighed(values) for values in ours))
    error = max(float((a - b).detach().abs().max()) for a, b in zip(ours, theirs, strict=True))
    # Of keys' biases the gradient is 0, and what is computed is rounding: softmax does not see them.
    least = _LEAST * max(float(g.norm()) for g in of_theirs.values())
    wrong = max(float((of_ours[n] - g).norm() / g.norm().clamp_min(least)) for n, g in of_theirs.items())
    return ("packed" if plan.packed else "padded"), error, wrong


def logprobs_of(model: PreTrainedModel, groups: list[Group], *, plan: ForwardPlan) -> Iterator[torch.Tensor]:
    """Yield each sample's logprobs as they are trained on; a sample's advantage is its number."""
    (micro,) = pack(groups, max_tokens=1 << 20, share_prefixes=plan.packed).micro_batches
    found = loss_token_logprobs(model, micro, plan=plan).logprobs
    yield from (found[micro.row == place] for place in micro.advantages.argsort().tolist())


def plain_logprobs(model: PreTrainedModel, sample: Sample) -> torch.Tensor:
    ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
    log_p = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
    start = len(sample.prompt_ids)
    return log_p[start - 1 : -1].gather(1, ids[0, start:, None]).squeeze(1)


def weighed(values: torch.Tensor) -> torch.Tensor:
    return (values * torch.arange(1, len(values) + 1).cos()).sum()


def gradients(model: PreTrainedModel, total: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    total.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def drawn_groups() -> Iterator[Group]:
    generator, number = torch.Generator().manual_seed(0), 0
    tokens = lambda count: tuple(torch.randint(3, VOCABULARY, (count,), generator=generator).tolist())  # noqa: E731
    for prompt, lengths in ((tokens(21), (30, 4, 13)), (tokens(1), (9, 26)), (tokens(40), (1,))):
        samples = []
        for length in lengths:
            ids = tokens(length)
            samples.append(Sample(prompt, ids, (-1.0,) * length, "stop", VersionSpan(0, 0), advantage=float(number)))
            number += 1
        yield Group(Prompt(str(number), prompt, ""), tuple(samples))


if __name__ == "__main__":
    main()
