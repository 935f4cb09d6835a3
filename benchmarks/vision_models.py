"""Tiny models for images and text of :mod:`models`, prompts with an image, and their errors against transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from lachesis.common.deadline import Deadline
from lachesis.common.prompt_images import PromptImages
from lachesis.common.types import GenerationRequest, Group, Prompt, Sample, SamplingParams
from lachesis.engines.embedded.engine import EmbeddedEngine
from lachesis.plugins.vision.settle import placeholders
from lachesis.train.batch import pack
from lachesis.train.model.forward import loss_token_logprobs, plan_forward

IMAGE = 3
_SIDE, _PATCH, _MERGE = 16, 4, 2
_TEXT: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
_LLAMA = _TEXT | {"model_type": "llama"}
_MROPE = _TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
_WINDOW = _TEXT | {
    "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8,
}  # fmt: skip
_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_TOWER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": _SIDE,
    "patch_size": _PATCH, "initializer_range": 0.2,
}  # fmt: skip
_QWEN: dict[str, Any] = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32,
    "patch_size": _PATCH, "initializer_range": 0.2,
}  # fmt: skip
_PLACED = _QWEN | {"num_position_embeddings": 16}
_DEEP = _PLACED | {"deepstack_visual_indexes": [0]}
_TOKENS = {"image_token_id": IMAGE, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
_IDEFICS = {"text_config": _LLAMA, "vision_config": _TOWER, "scale_factor": _MERGE, "image_token_id": IMAGE}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2_vl": _TOKENS | {"text_config": _MROPE, "vision_config": {
        "depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": _PATCH}},
    "qwen2_5_vl": _TOKENS | {"text_config": _MROPE, "vision_config": _QWEN | {
        "window_size": 16, "fullatt_block_indexes": [0]}},
    "qwen3_vl": _TOKENS | {"text_config": _MROPE, "vision_config": _DEEP},
    "qwen3_vl_moe": _TOKENS | {"text_config": _MROPE | _EXPERTS, "vision_config": _DEEP},
    "qwen3_5": _TOKENS | {"text_config": _MROPE | _DELTA, "vision_config": _PLACED},
    "qwen3_5_moe": _TOKENS | {"text_config": _MROPE | _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 16},
                              "vision_config": _PLACED},
    "gemma3": {"text_config": _WINDOW, "vision_config": _TOWER | {"vision_use_head": False}, "mm_tokens_per_image": 4,
               "image_token_index": IMAGE, "boi_token_index": 5, "eoi_token_index": 6},
    "idefics3": _IDEFICS, "smolvlm": _IDEFICS,
    "llava": {"text_config": _LLAMA, "vision_config": _TOWER | {
        "model_type": "siglip_vision_model", "vision_use_head": False}, "image_token_index": IMAGE,
        "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    "mistral3": {"text_config": _TEXT | {"model_type": "mistral"}, "vision_config": _TOWER | {
        "model_type": "pixtral", "head_dim": 8}, "image_token_index": IMAGE, "spatial_merge_size": _MERGE,
        "vision_feature_layer": -1},
    "internvl": {"text_config": _TEXT | {"model_type": "qwen2"}, "vision_config": _TOWER | {
        "image_size": [_SIDE, _SIDE], "patch_size": [_PATCH, _PATCH]}, "image_token_id": IMAGE, "image_seq_length": 4,
        "downsample_ratio": 0.5},
}  # fmt: skip


def tiny(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **ARCHITECTURES[name], tie_word_embeddings=False)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():  # biases, and Gemma 3's projector, which would hide every image
                parameter.normal_(std=0.2)
    return model


def prompts(name: str) -> list[Prompt]:
    """Return three prompts with an image of random pixels, the first and the last of one size, and a text."""
    sizes = ((16, 24), (32, 16), (16, 24))
    of_images = [_prompt(name, number, *size) for number, size in enumerate(sizes)]
    return [*of_images, Prompt("3", tuple(range(7, 18)), "")]


def _prompt(name: str, number: int, width: int, height: int) -> Prompt:
    random = np.random.default_rng(number)
    inputs: dict[str, Any] = {"pixel_values": _pixels(random, 1, 3, _SIDE, _SIDE)}
    places, types = (_SIDE // _PATCH // _MERGE) ** 2, None
    if name.startswith("qwen"):
        grid = (1, height // _PATCH, width // _PATCH)
        values = 3 * 2 * _PATCH**2
        inputs = {"pixel_values": _pixels(random, grid[1] * grid[2], values), "image_grid_thw": np.array([grid])}
        places, types = grid[1] * grid[2] // _MERGE**2, "mm_token_type_ids"
    elif name in ("idefics3", "smolvlm"):
        mask = np.ones((1, 1, _SIDE, _SIDE), dtype=bool)
        inputs = {"pixel_values": inputs["pixel_values"][None], "pixel_attention_mask": mask}
    elif name == "mistral3":
        inputs["image_sizes"] = np.array([[_SIDE, _SIDE]])
    elif name == "gemma3":
        types = "token_type_ids"
    elif name == "llava":
        places = (_SIDE // _PATCH) ** 2
    ids = (7, 5, *[IMAGE] * places, 6, 9)
    by_token = {} if types is None else {types: np.array([0, 0, *[1] * places, 0, 0])}
    return Prompt(str(number), ids, "", images=PromptImages(inputs, by_token, [(width, height)]))


def _pixels(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.standard_normal(shape).astype(np.float32)


def sampled(model: PreTrainedModel, asked: list[Prompt]) -> list[Group]:
    """Return three completions of each prompt by the embedded engine."""
    engine = EmbeddedEngine(model, eos_token_ids=[1], pad_token_id=0, max_batch_size=16, max_context=100)
    params = SamplingParams(max_tokens=8, stop_token_ids=placeholders(model.config))
    requests = [GenerationRequest(p.token_ids, params, 3, seed, images=p.images) for seed, p in enumerate(asked)]
    answers = engine.generate(requests, deadline=Deadline("completions", 60.0))
    return [
        Group(
            prompt,
            tuple(
                Sample(prompt.token_ids, one.token_ids, one.logprobs, one.finish_reason, one.versions, advantage=1.0)
                for one in answer
            ),
        )
        for prompt, answer in zip(asked, answers, strict=True)
    ]


@torch.no_grad()
def error_of_engine(model: PreTrainedModel, groups: list[Group]) -> float:
    """Return the largest difference, in nats, of samples' logprobs from transformers' own, one sequence at a time."""
    return max(_alone(model, group.prompt, sample) for group in groups for sample in group.samples)


def _alone(model: PreTrainedModel, prompt: Prompt, sample: Sample) -> float:
    # The last token is no input: it may be a placeholder.
    ids = torch.tensor([sample.prompt_ids + sample.completion_ids])[:, :-1]
    shown: dict[str, torch.Tensor] = {}
    if prompt.images is not None:
        shown = {name: torch.from_numpy(value) for name, value in prompt.images.inputs.items()}
        for name, types in prompt.images.token_types.items():
            shown[name] = torch.zeros_like(ids)
            shown[name][0, : len(types)] = torch.from_numpy(types)
    logits = model(input_ids=ids, **shown).logits[0, len(sample.prompt_ids) - 1 :]
    own = logits.log_softmax(-1).gather(1, torch.tensor(sample.completion_ids)[:, None])[:, 0]
    return float((own - torch.tensor(sample.logprobs)).abs().max())


def error_of_trainer(model: PreTrainedModel, groups: list[Group]) -> float:
    """Return the largest difference, in nats, of the trainer's logprobs from those of the samples."""
    plan = plan_forward(model, packing="padded")
    batch = pack(groups, max_tokens=1 << 20, share_prefixes=False)
    with torch.no_grad():
        found = [(loss_token_logprobs(model, one, plan=plan).logprobs, one) for one in batch.micro_batches]
    return max(float((logprobs - micro.sampling_logprobs).abs().max()) for logprobs, micro in found)
