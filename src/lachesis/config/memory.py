"""Memory and disk that a configuration will take, in bytes, from the model's shape alone.

What such a count leaves out: the allocator's fragments, CUDA's own context (about half a GiB a process), and
buffers of kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lachesis.config.schema import LachesisConfig
from lachesis.config.shape import DTYPE_BYTES, ModelShape

Place = Literal["trainer", "engine"]
# Of NF4: weights that share a scale, scales that share one in float32, and bytes of tables that each matrix has.
_NF4_BLOCK, _NF4_SCALES, _NF4_TABLES = 64, 256, 1092
# As in lachesis.train.model.head: one chunk of logits in float32, and its gradient.
_CHUNK_ELEMENTS = {"cuda": 1 << 27, "cpu": 1 << 24}

_SHARDED = ("weights", "gradients", "adapter", "optimizer states", "reference")


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


def memory_parts(config: LachesisConfig, shape: ModelShape, *, lengths: Lengths, device: str) -> list[Part]:
    """What the trainer and the engine hold, and when. ``device`` is ``cuda`` or ``cpu``."""
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
    return parts + _engine_parts(config, shape, lengths=lengths, width=width)


def shard_parts(
    parts: list[Part], config: LachesisConfig, shape: ModelShape, *, devices: int, width: int
) -> list[Part]:
    """What each of several devices holds of the trainer's parts, and the first of them of an engine in its process."""
    distributed = config.distributed
    if distributed.strategy == "replicate":
        return parts
    ways = distributed.shard_size or devices
    found = []
    for part in parts:
        if part.place != "trainer" or part.name not in _SHARDED:
            found.append(part)
        elif not distributed.cpu_offload:
            found.append(Part(part.name, part.place, part.phase, -(-part.bytes // ways)))
    # A layer that runs and the one that is gathered meanwhile, and what is outside of the layers.
    outside = shape.parameters - shape.layers * shape.layer_parameters
    gathered = outside + 2 * shape.layer_parameters if distributed.reshard_after_forward else shape.parameters
    found.append(Part("gathered weights", "trainer", "training", gathered * width))
    if config.engine.kind == "embedded":
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
    if config.engine.kind == "embedded" or config.bridge.kind == "shared_vllm":
        return [cache]
    if (config.bridge.kind == "lora_only" or config.bridge.kind == "lora_nccl") and config.bridge.share_base:
        return [cache]
    return [Part("weights", "engine", "always", shape.parameters * width), cache]
