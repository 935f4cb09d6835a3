"""Memory and disk that a configuration will take, in bytes, from the model's shape alone: its config.json.

What such a count leaves out: the allocator's fragments, CUDA's own context (about half a GiB a process), and
buffers of kernels. Nothing is loaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lachesis.common.errors import ConfigError
from lachesis.common.json_values import is_object
from lachesis.config.schema import LachesisConfig

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
Place = Literal["trainer", "engine"]
# Of NF4: weights that share a scale, scales that share one in float32, and bytes of tables that each matrix has.
_NF4_BLOCK, _NF4_SCALES, _NF4_TABLES = 64, 256, 1092
# As in lachesis.train.model.head: one chunk of logits in float32, and its gradient.
_CHUNK_ELEMENTS = {"cuda": 1 << 27, "cpu": 1 << 24}

_SHARDED = ("weights", "gradients", "adapter", "optimizer states", "reference")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder: widths in elements, ``dtype`` that of the checkpoint.

    ``experts`` are those that a layer holds, ``active_experts`` those that a token goes through; one and one
    without a mixture.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int | None
    tied: bool
    attention_bias: bool
    experts: int
    active_experts: int
    dtype: str

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """The linear layers of one decoder layer (of one expert): inputs and outputs of each."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden, q),
            "k_proj": (self.hidden, kv),
            "v_proj": (self.hidden, kv),
            "o_proj": (q, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    @property
    def quantizable(self) -> list[tuple[int, int]]:
        """Of those, inputs and outputs of the ones that can be quantized: not a mixture's experts, which are fused."""
        fused = ("gate_proj", "up_proj", "down_proj") if self.experts > 1 else ()
        return [sides for name, sides in self.linears.items() if name not in fused]

    @property
    def layer_parameters(self) -> int:
        """Of one decoder layer with a gated feed-forward part."""
        matrices = {name: rows * columns for name, (rows, columns) in self.linears.items()}
        feed_forward = sum(matrices[name] for name in ("gate_proj", "up_proj", "down_proj"))
        attention = sum(matrices[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
        bias = (self.heads + 2 * self.kv_heads) * self.head_dim if self.attention_bias else 0
        router = self.hidden * self.experts if self.experts > 1 else 0
        return attention + bias + feed_forward * self.experts + router + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """Of the whole model: embeddings, layers, norms, head."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + embeddings + self.hidden

    @property
    def kv_elements_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.kv_heads * self.head_dim * self.layers

    @property
    def activation_elements_per_token(self) -> int:
        """What the backward pass of one layer keeps of a token.

        Counted along the layer: the residual stream and its norm before attention and before the feed-forward
        part (4 hidden), queries before and after rotation and the attention's result (3 q), keys before and after
        rotation and values (3 kv), and gate, up and their product (3 intermediate; the activation is made again).
        For the shape of Qwen2.5-1.5B that is 2.15 MB a token in bfloat16, where 1.95 were measured.
        """
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return 4 * self.hidden + 3 * q + 3 * kv + 3 * self.intermediate * self.active_experts

    def lora_parameters(self, *, rank: int, targets: str | list[str]) -> int:
        """Of LoRA's two matrices on each target, in all layers and experts."""
        named = self.linears if targets == "all-linear" else [targets] if isinstance(targets, str) else targets
        layer = 0
        for name in named:
            rows, columns = self.linears.get(name.rpartition(".")[2], (0, 0))
            copies = self.experts if name.endswith(("gate_proj", "up_proj", "down_proj")) else 1
            layer += rank * (rows + columns) * copies
        return layer * self.layers


def read_shape(model: str) -> ModelShape | None:
    """The shape of a model directory, or of a hub model in the local cache; None where there is no config.json.

    Raises:
        ConfigError: the config.json cannot be read, or is not that of a decoder with the usual keys.
    """
    path = _config_path(model)
    if path is None:
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}", remedy="give a model directory that is whole") from error
    if not is_object(data):
        raise ConfigError(f"{path} is no mapping", remedy="give a model directory that is whole")
    text = data.get("text_config", data)
    try:
        return _shape(text, dtype=str(text.get("dtype") or data.get("dtype") or data.get("torch_dtype") or "bfloat16"))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: no decoder whose memory is known: {error!r}", remedy="plan without it, from the batches alone"
        ) from error


def _shape(data: Mapping[str, Any], *, dtype: str) -> ModelShape:
    heads, hidden = int(data["num_attention_heads"]), int(data["hidden_size"])
    experts = int(data.get("num_local_experts") or data.get("num_experts") or 1)
    width = data.get("moe_intermediate_size") if experts > 1 else None
    return ModelShape(
        layers=int(data["num_hidden_layers"]),
        hidden=hidden,
        intermediate=int(width or data["intermediate_size"]),
        heads=heads,
        kv_heads=int(data.get("num_key_value_heads") or heads),
        head_dim=int(data.get("head_dim") or hidden // heads),
        vocab=int(data["vocab_size"]),
        context=int(data["max_position_embeddings"]) if data.get("max_position_embeddings") else None,
        tied=bool(data.get("tie_word_embeddings", False)),
        attention_bias=bool(data.get("attention_bias", data.get("model_type") == "qwen2")),
        experts=experts,
        active_experts=int(data.get("num_experts_per_tok") or 1) if experts > 1 else 1,
        dtype=dtype.removeprefix("torch."),
    )


def _config_path(model: str) -> Path | None:
    """``config.json`` in the directory, or in the newest snapshot of the hub's cache."""
    local = Path(model) / "config.json"
    if local.is_file():
        return local
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    found = sorted(
        (cache / f"models--{model.replace('/', '--')}" / "snapshots").glob("*/config.json"),
        key=lambda path: path.stat().st_mtime,
    )
    return found[-1] if found else None


@dataclass(frozen=True, slots=True)
class Part:
    """One use of memory. ``while_`` is the phase in which it is held: always, training or generating."""

    name: str
    place: Place
    phase: Literal["always", "training", "generating"]
    bytes: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens: of a longest prompt and completion, in one forward pass, and in flight while generating."""

    longest: int
    microbatch: int
    in_flight: int


def trainable_parameters(config: LachesisConfig, shape: ModelShape) -> int:
    """All of them, those of some layers, or the adapter's."""
    if config.adapter.kind == "none":
        chosen = config.model.train_layers
        return shape.parameters if chosen is None else len(set(chosen)) * shape.layer_parameters
    whole = shape.lora_parameters(rank=config.adapter.r, targets=config.adapter.targets)
    return whole if config.adapter.layers is None else whole * len(set(config.adapter.layers)) // shape.layers


def memory_parts(
    config: LachesisConfig, shape: ModelShape, *, lengths: Lengths, device: str, devices: int = 1
) -> list[Part]:
    """What the trainer and the engine hold, and when, on one of ``devices``; ``device`` is ``cuda`` or ``cpu``."""
    width = weight_bytes(config, shape, device=device)
    trained = trainable_parameters(config, shape)
    parts = [
        Part("weights", "trainer", "always", held_weights_bytes(config, shape, width=width)),
        Part("gradients", "trainer", "training", trained * width),
        Part("activations", "trainer", "training", _activations(config, shape, tokens=lengths.microbatch, width=width)),
        Part(
            "logits chunk",
            "trainer",
            "training",
            2 * 4 * min(_CHUNK_ELEMENTS[device], lengths.microbatch * shape.vocab),
        ),
    ]
    if config.model.quantization != "none":
        largest = max((rows * columns for rows, columns in shape.quantizable), default=0)
        parts.append(Part("dequantized matrix", "trainer", "training", largest * width))
    if config.adapter.kind == "lora":
        parts.append(Part("adapter", "trainer", "always", trained * width))
    if states := _optimizer_bytes(config, shape, trained=trained, width=width, device=device):
        parts.append(Part("optimizer states", "trainer", "always", states))
    if reference := _reference_bytes(config, shape, width=width):
        parts.append(Part("reference", "trainer", "always", reference))
    parts += _engine_parts(config, shape, lengths=lengths, width=width)
    return _sharded(parts, config, shape, devices=devices, width=width)


def _sharded(parts: list[Part], config: LachesisConfig, shape: ModelShape, *, devices: int, width: int) -> list[Part]:
    """What each of several devices holds of the trainer's parts, and the first of them of an engine in its process."""
    distributed = config.distributed
    if devices == 1 or distributed.strategy == "replicate":
        return parts
    ways = distributed.shard_size or devices
    found: list[Part] = []
    for part in parts:
        if part.place != "trainer" or part.name not in _SHARDED:
            found.append(part)
        elif not distributed.cpu_offload:
            found.append(Part(part.name, part.place, part.phase, -(-part.bytes // ways)))
    # A layer that runs and the one that is gathered meanwhile, and what is outside of the layers.
    outside = shape.parameters - shape.layers * shape.layer_parameters
    gathered = outside + 2 * shape.layer_parameters if distributed.reshard_after_forward else shape.parameters
    found.append(Part("gathered weights", "trainer", "training", gathered * width))
    if config.engine.place == "trainer":
        found.append(Part("weights", "engine", "always", shape.parameters * width))
    return found


def held_weights_bytes(config: LachesisConfig, shape: ModelShape, *, width: int) -> int:
    """The model's weights in the trainer, ``width`` bytes each but for the linear layers that are quantized.

    Those take a byte a weight and a float32 scale for each row (int8), or half a byte, a byte for the scale of each
    64 weights and a float32 for each 256 of those (NF4 with double quantization, QLoRA, arXiv 2305.14314).
    """
    kind = config.model.quantization
    if kind == "none":
        return shape.parameters * width
    quantized = 0
    for inputs, outputs in shape.quantizable:
        count = inputs * outputs
        scales = -(-count // _NF4_BLOCK)
        if kind == "int8":
            quantized += count + 4 * outputs
        else:
            quantized += -(-count // 2) + scales + 4 * -(-scales // _NF4_SCALES) + _NF4_TABLES
    left = shape.parameters - shape.layers * sum(inputs * outputs for inputs, outputs in shape.quantizable)
    return shape.layers * quantized + left * width


def weight_bytes(config: LachesisConfig, shape: ModelShape, *, device: str) -> int:
    """Bytes of one weight in the trainer; ``auto`` is the checkpoint's dtype on GPU and float32 on CPU."""
    dtype = config.model.dtype
    if dtype == "auto":
        dtype = shape.dtype if device == "cuda" else "float32"
    return DTYPE_BYTES.get(dtype, 2)


def checkpoint_bytes(config: LachesisConfig, shape: ModelShape, *, device: str) -> int:
    """One resumable checkpoint: what is trained, and the optimizer's states."""
    width = weight_bytes(config, shape, device=device)
    trained = trainable_parameters(config, shape)
    states = _optimizer_bytes(config, shape, trained=trained, width=width, device=None)
    return trained * width + states


def export_bytes(config: LachesisConfig, shape: ModelShape, *, device: str) -> int:
    """What final/ holds, and each export of a bridge that goes over the disk: the model, or the adapter."""
    saved = shape.parameters if config.adapter.kind == "none" else trainable_parameters(config, shape)
    return saved * weight_bytes(config, shape, device=device)


def _optimizer_bytes(config: LachesisConfig, shape: ModelShape, *, trained: int, width: int, device: str | None) -> int:
    """Moments, and float32 masters of 16-bit weights, on ``device`` (None: wherever they are)."""
    optimizer, update = config.optimizer, config.optimizer.weight_update
    masters = 4 * trained if width == 2 and update in ("auto", "fp32_master") else 0
    moment = width if update == "plain" else 4
    if optimizer.function is not None:  # how many states it has is not known: those of AdamW
        return 2 * moment * trained + masters
    match optimizer.kind:
        case "adamw":
            return 2 * moment * trained + masters
        case "adamw_8bit":
            return 2 * trained + masters
        case "adamw_cpu":
            return 0 if device == "cuda" else 2 * moment * trained + masters
        case "adafactor":
            # A row and a column of moments for each matrix, instead of the matrix.
            mean_side = max(1, round((trained / max(1, 7 * shape.layers)) ** 0.5))
            return 4 * 2 * trained // mean_side + masters


def _reference_bytes(config: LachesisConfig, shape: ModelShape, *, width: int) -> int:
    """A copy for the KL term; the base model under an adapter is there already."""
    algorithm = config.algorithm
    if algorithm.beta == 0 or algorithm.kl_reference == "sampler":
        return 0
    if config.adapter.kind == "lora":
        return trainable_parameters(config, shape) * width if algorithm.kl_reference == "ema" else 0
    return shape.parameters * width


def _activations(config: LachesisConfig, shape: ModelShape, *, tokens: int, width: int) -> int:
    """What the backward pass needs of one micro-batch."""
    layer = shape.activation_elements_per_token
    recomputed = config.model.gradient_checkpointing
    kept = shape.layers * shape.hidden + layer if recomputed else shape.layers * layer
    widened = 0
    if config.model.residual_dtype == "float32":
        # The stream before attention and before the feed-forward part; what is recomputed keeps the former.
        widened = (1 if recomputed else 2) * shape.layers * shape.hidden * max(0, 4 - width)
    return tokens * (width * (kept + 2 * shape.hidden) + widened)


def _engine_parts(config: LachesisConfig, shape: ModelShape, *, lengths: Lengths, width: int) -> list[Part]:
    """The engine's own weights, unless they are the trainer's, and its cache for a whole batch."""
    cache = Part("KV cache", "engine", "generating", shape.kv_elements_per_token * width * lengths.in_flight)
    if config.engine.place == "trainer" or config.bridge.kind == "shared_vllm":
        return [cache]
    if (config.bridge.kind == "lora_only" or config.bridge.kind == "lora_nccl") and config.bridge.share_base:
        return [cache]
    return [Part("weights", "engine", "always", shape.parameters * width), cache]
