"""Memory and disk that a configuration will take, in bytes, from the model's shape alone.

Parts are tensors; :mod:`lachesis.plan.cards` adds the rest of a process (CUDA's context, the allocator's rounding).
Nothing is loaded. ``benchmarks/memory.py`` compares the sums with measured steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lachesis.config.schema import SPARING, ChannelBridgeConfig, LachesisConfig
from lachesis.config.schema.mesh import Mesh, derive_mesh
from lachesis.engines.gpus import is_colocated
from lachesis.plan.shapes import FEED_FORWARD, ModelShape

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
Place = Literal["trainer", "engine"]
# Phases in which memory is held: ``passes`` are forward and backward, ``update`` the optimizer and the transfer.
Phase = Literal["passes", "update", "generation"]
ALWAYS: tuple[Phase, ...] = ("passes", "update", "generation")
TRAINING: tuple[Phase, ...] = ("passes", "update")
# Part of memory for ranks that shard.
GATHERED = "gathered weights"
# NF4: weights that share a scale, scales that share one in float32, and bytes of each matrix's tables.
_NF4_BLOCK, _NF4_SCALES, _NF4_TABLES = 64, 256, 1092
# As in lachesis.train.model.head: elements of one chunk of logits.
CHUNK_ELEMENTS = {"cuda": 1 << 27, "cpu": 1 << 24}
# As there: elements of the derivatives kept for the head's weight.
KEPT_ELEMENTS = {"cuda": 5 << 28, "cpu": 1 << 26}
# Tensors of a chunk at a time: on a GPU logits in float32 and their gradient, fused by the compiler; on a CPU logits,
# logprobs, probabilities and three steps of the gradient, all in float32.
_CPU_CHUNK_TENSORS = 6
# As in lachesis.train.optim.weight_update: elements of the parameters that are updated together.
BUCKET_ELEMENTS = 1 << 26
# As in lachesis.transport.layout: the size of a channel's bucket, and the number in transit while the next is made.
TRANSFER_BYTES, TRANSFER_WINDOW = 256 * 2**20, 4
# cuBLAS keeps a workspace of this size, which torch allocates for it (NVIDIA's advice for Hopper; 8 MiB before).
_CUBLAS_BYTES = 32 * 2**20

_SHARDED = ("weights", "gradients", "adapter", "optimizer states", "reference", "teacher")


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """Use of memory, and the phases in which it is held."""

    name: str
    place: Place
    phases: tuple[Phase, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens: of a longest sequence, in one forward pass, and in flight while generating.

    ``keys`` are those that queries see over the tokens of a pass: more than one for each where completions share a
    prompt, whose keys are there for each of them. ``patches`` are those of a pass's images.
    """

    longest: int
    microbatch: int
    in_flight: int
    keys: float = 1.0
    patches: int = 0


def trainable_parameters(config: LachesisConfig, shape: ModelShape) -> int:
    """Return the number of trained parameters: all, those of some layers, or the adapter's."""
    if config.adapter.kind == "none":
        chosen = config.model.train_layers
        tower = tower_parameters(config, shape) if config.model.vision == "trained" else 0
        return shape.parameters + tower if chosen is None else len(set(chosen)) * shape.layer_parameters
    whole = shape.lora_parameters(rank=config.adapter.r, targets=config.adapter.targets)
    return whole if config.adapter.layers is None else whole * len(set(config.adapter.layers)) // shape.layers


def tower_parameters(config: LachesisConfig, shape: ModelShape) -> int:
    """Return the parameters of the encoder of images; 0 where none are shown."""
    return shape.tower.parameters if shape.tower is not None and config.model.sees_images else 0


def memory_parts(
    config: LachesisConfig,
    shape: ModelShape,
    *,
    lengths: Lengths,
    device: str,
    devices: int = 1,
    teachers: Sequence[ModelShape] = (),
) -> list[MemoryPart]:
    """Return the memory of trainer and engine, by phase, on one of ``devices``; ``device`` is ``cuda`` or ``cpu``.

    Args:
        teachers: the shapes of the models that ``algorithm.teacher`` or ``algorithm.teachers`` names, each once.
    """
    width = weight_bytes(config, shape, device=device)
    mesh = derive_mesh(config.distributed, ranks=devices)
    parts = [
        *_held_parts(config, shape, width=width, device=device, mesh=mesh),
        *_ring_parts(config, shape, width=width, devices=devices),
        *_pass_parts(config, shape, lengths=lengths, width=width, device=device, mesh=mesh),
        *_update_parts(config, shape, width=width, device=device),
        *_teacher_parts(config, shape, teachers, lengths=lengths, device=device),
        *_engine_parts(config, shape, lengths=lengths, width=width),
    ]
    return _sharded([part for part in parts if part.bytes], config, shape, mesh=mesh, width=width)


def _held_parts(
    config: LachesisConfig, shape: ModelShape, *, width: int, device: str, mesh: Mesh
) -> Iterator[MemoryPart]:
    """Yield the memory that the trainer holds from start to end."""
    trained = trainable_parameters(config, shape)
    if not config.shares_weights:
        yield MemoryPart("weights", "trainer", ALWAYS, held_weights_bytes(config, shape, width=width))
    yield MemoryPart("vision tower", "trainer", ALWAYS, tower_parameters(config, shape) * width)
    if config.adapter.kind == "lora":
        yield MemoryPart("adapter", "trainer", ALWAYS, trained * width)
    yield MemoryPart("optimizer states", "trainer", ALWAYS, _optimizer_bytes(config, shape, trained, width, device))
    yield MemoryPart("reference", "trainer", ALWAYS, _reference_bytes(config, shape, width=width))
    # Replicas add up gradients in float32, exchanged once a step.
    replicated = not mesh.whole and mesh.replicate > 1
    yield MemoryPart("gradients", "trainer", TRAINING, trained * (max(width, 4) if replicated else width))


def _pass_parts(
    config: LachesisConfig, shape: ModelShape, *, lengths: Lengths, width: int, device: str, mesh: Mesh
) -> Iterator[MemoryPart]:
    """Yield the memory of forward and backward for a micro-batch, except for parts that devices share."""
    layer = layer_activations(config, shape, keys=lengths.keys, width=width, device=device, context=mesh.context)
    tokens = -(-lengths.microbatch // mesh.context)
    kept = _kept_activations(config, shape, layer=layer, width=width)
    trained = config.adapter.kind == "none" and config.model.train_layers is None
    # Around the layers: the last norm, which is not compiled, and the head's input.
    kept += shape.hidden * (max(width, 4) + width * (2 + trained))
    yield MemoryPart("activations", "trainer", ("passes",), round(tokens * kept))
    head = _head_bytes(config, shape, tokens=tokens, width=width, device=device)
    backward = _backward_bytes(config, shape, tokens=tokens, width=width, mesh=mesh)
    if head >= backward:  # the head's backward pass ends before that of the layers begins
        yield MemoryPart("logits chunk", "trainer", ("passes",), head)
    else:
        yield MemoryPart("backward pass", "trainer", ("passes",), backward)
    if shape.tower is not None:  # a frozen one keeps nothing, so only one layer exists at a time
        layers = shape.tower.layers if config.model.vision == "trained" else 1
        each = 4 * shape.tower.patch + width * layers * shape.tower.layer_elements
        yield MemoryPart("images", "trainer", ("passes",), lengths.patches * each)
    if config.model.quantization != "none":
        largest = max((rows * columns for rows, columns in shape.quantizable), default=0)
        yield MemoryPart("dequantized matrix", "trainer", ("passes",), largest * width)
    if device == "cuda":
        yield MemoryPart("workspace", "trainer", ALWAYS, _CUBLAS_BYTES)


def layer_activations(
    config: LachesisConfig, shape: ModelShape, *, keys: float, width: int, device: str, context: int = 1
) -> float:
    """Return the bytes per token that the backward pass of one decoder layer keeps.

    Attention keeps its queries, keys, values and result, and a float32 of each head. Compiled, a layer keeps the stream
    before its two norms, their results, and gate, up and their product; norms and rotations are recomputed. Uncompiled,
    a norm keeps its input (in float32, a copy if weights are 16-bit), the normalized input if its weight is trained,
    and its result, and the feed-forward part also keeps the activated gate. With queries and keys normalized, the
    inputs of these norms are kept too. An adapter keeps the narrow result of each first matrix. In a mixture, tokens
    are gathered for their experts and weighted afterwards. If ``context`` devices share tokens, each has the same
    amount of attention, in some heads of all tokens, but at least one head of keys and values; and attention's result
    twice, before and after its exchange. If they share experts, as many tokens arrive as leave.
    """
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    compiled = config.model.compile == "on" or (config.model.compile == "auto" and device == "cuda")
    own_kv = max(shape.kv_heads, context) * shape.head_dim
    attention = width * ((2 if context == 1 else 3) * q + 2 * own_kv * keys) + 4 * shape.heads
    copied = 4 // width if width < 4 else 0 if compiled else 1
    if compiled:
        norms, per_expert = 4 * shape.hidden, 3 * shape.intermediate
        narrow = q + kv if shape.qk_norm else 0
    else:
        trained = 1 if config.adapter.kind == "none" else 0
        norms, per_expert = 2 * (copied + trained + 1) * shape.hidden, 4 * shape.intermediate
        narrow = (copied + trained) * (q + kv) if shape.qk_norm else 0
    routed = 2 * shape.hidden if shape.experts > 1 else 0
    elements = norms + narrow + (per_expert + routed) * shape.active_experts
    if config.adapter.kind == "lora":
        elements += config.adapter.r * len(shape.targeted(config.adapter.targets))
    router = 4 * shape.experts if shape.experts > 1 else 0
    return width * elements + attention + router


def _kept_activations(config: LachesisConfig, shape: ModelShape, *, layer: float, width: int) -> float:
    """Return the bytes per token that all decoder layers keep, with those of a recomputed layer.

    Selective layers keep attention's result, and a float32 of each head, besides their input. Two offloaded inputs are
    on the device: the one in use, and the one in transit.
    """
    which = config.model.kept_activations
    if which in ("auto", "keep"):  # a run resolves auto before it calls this
        return shape.layers * layer
    own = shape.hidden * width
    if which == "selective":
        own += shape.heads * (shape.head_dim * width + 4)
    layers = min(2, shape.layers) if which == "offload" else shape.layers
    return layers * own + layer


def offloaded_bytes(config: LachesisConfig, shape: ModelShape, *, lengths: Lengths, device: str, mesh: Mesh) -> int:
    """Return the bytes of pinned host memory for a rank's offloaded inputs of all decoder layers."""
    if config.model.kept_activations != "offload" or device != "cuda":
        return 0
    width = weight_bytes(config, shape, device=device)
    tokens = -(-lengths.microbatch // mesh.context)
    return tokens * shape.layers * shape.hidden * width


def _head_bytes(config: LachesisConfig, shape: ModelShape, *, tokens: int, width: int, device: str) -> int:
    """Return the peak of the head's two passes: a chunk of logits, and gradients of hidden states and weight.

    The latter is made in float32, and rounded at the end: if layers keep their activations, from derivatives kept up to
    a limit; else by adding each chunk.
    """
    elements = min(CHUNK_ELEMENTS[device], tokens * shape.vocab)
    chunk = elements * (4 if device == "cuda" else 4 * _CPU_CHUNK_TENSORS)
    hidden = 2 * tokens * shape.hidden * width
    if config.adapter.kind == "lora" or config.model.train_layers is not None:
        return chunk + elements * width + hidden
    weight = shape.vocab * shape.hidden
    if config.model.kept_activations in SPARING:
        return hidden + 4 * weight + max(chunk, weight * width) + elements * width
    kept = min(KEPT_ELEMENTS[device], tokens * shape.vocab) * width
    return hidden + kept + max(chunk, weight * (4 + width))


def _backward_bytes(config: LachesisConfig, shape: ModelShape, *, tokens: int, width: int, mesh: Mesh) -> int:
    """Return the peak of a layer's backward pass: gradients of its widest part, and of its weights."""
    flowing = (2 * shape.hidden + 3 * shape.intermediate * shape.active_experts) * width * tokens
    trained = layer_part(shape, mesh=mesh) if config.adapter.kind == "none" else 0
    return flowing + trained * width


def _update_parts(config: LachesisConfig, shape: ModelShape, *, width: int, device: str) -> Iterator[MemoryPart]:
    """Yield the temporary memory of the optimizer and the transfer."""
    trained = trainable_parameters(config, shape)
    whole = config.adapter.kind == "none" and config.model.train_layers is None
    largest = shape.vocab * shape.hidden if whole else 0
    largest = max(largest, min(trained, shape.hidden * shape.intermediate)) if trained else 0
    # A bucket is updated while the next one is prepared.
    buckets = min(trained, max(largest, BUCKET_ELEMENTS) + BUCKET_ELEMENTS)
    moment = 0
    update = config.optimizer.weight_update
    if config.optimizer.kind == "adamw_cpu" and device == "cuda":
        moment = 2 * 4 * largest
    elif width == 2 and update in ("auto", "fp32_master"):
        moment = 4 * buckets
    elif width == 2 and update == "stochastic_rounding":
        moment = 8 * buckets + 4 * largest
    if config.optimizer.kind == "adafactor":
        moment += 2 * 4 * largest
    sent = (TRANSFER_WINDOW + 1) * TRANSFER_BYTES if config.bridge.kind in ("broadcast", "lora_nccl") else 0
    if config.adapter.kind == "lora":
        sent = min(sent, 2 * trained * width)
    yield MemoryPart("update", "trainer", ("update",), max(moment, sent))


def kept_aside_bytes(config: LachesisConfig, shape: ModelShape) -> int:
    """Return the bytes of an update that each engine worker on a GPU keeps beyond its share.

    With ``bridge.staging: auto`` a worker looks for room at the first update; if there is none, updates go through
    host memory. For an adapter alone it is almost nothing, and for servers that already run it is not known.
    """
    staged = config.bridge.kind == "broadcast" and config.bridge.staging in ("auto", "device")
    if not staged or sleeps(config) or config.engine.kind == "http":
        return 0
    return shape.parameters * weight_bytes(config, shape, device="cuda")


def must_keep_aside(config: LachesisConfig) -> bool:
    """Return True if updates are kept on the engine's GPU even if it lacks the room."""
    return config.bridge.kind == "broadcast" and config.bridge.staging == "device"


def _ring_parts(config: LachesisConfig, shape: ModelShape, *, width: int, devices: int) -> Iterator[MemoryPart]:
    """Yield the memory that stays mapped for an engine's worker on a rank's GPU; ``update`` counts it too."""
    bridge = config.bridge
    in_place = isinstance(bridge, ChannelBridgeConfig) and bridge.transport in ("auto", "ipc")
    if in_place and is_colocated(config, ranks=devices):
        alone = config.adapter.kind == "lora" and bridge.capabilities.adapter_only
        sent = (trainable_parameters(config, shape) if alone else shape.parameters) * width
        largest = 0 if alone else shape.vocab * shape.hidden * width
        ring = min(sent, max(TRANSFER_WINDOW * TRANSFER_BYTES, largest))
        yield MemoryPart("packed buckets", "trainer", ("passes", "generation"), ring)


def _sharded(
    parts: list[MemoryPart], config: LachesisConfig, shape: ModelShape, *, mesh: Mesh, width: int
) -> list[MemoryPart]:
    """Return the trainer's parts on each of several devices, with those of an engine in its process on the first."""
    distributed = config.distributed
    if mesh.ranks == 1 or mesh.whole:
        return parts
    found: list[MemoryPart] = []
    for part in parts:
        if part.place != "trainer" or part.name not in _SHARDED:
            found.append(part)
        elif not distributed.cpu_offload:
            found.append(MemoryPart(part.name, part.place, part.phases, -(-part.bytes // mesh.cut)))
    gathered = _gathered_bytes(config, shape, width=width, mesh=mesh)
    found.append(MemoryPart(GATHERED, "trainer", ("passes",), gathered))
    if config.engine.place == "trainer":
        found.append(MemoryPart("weights", "engine", ALWAYS, shape.parameters * width))
    return found


def layer_part(shape: ModelShape, *, mesh: Mesh) -> int:
    """Return the parameters of a layer that each of the devices computes with: all except other devices' experts."""
    experts = sum(math.prod(shape.linears[name]) for name in FEED_FORWARD) * shape.experts
    return shape.layer_parameters - experts + experts // mesh.expert


def _gathered_bytes(config: LachesisConfig, shape: ModelShape, *, width: int, mesh: Mesh) -> int:
    """Return the bytes of whole weights, and of whole gradients on their way to the ranks that keep them.

    These are a running layer, the one gathered meanwhile, and the weights outside the layers; or all weights if they
    are not freed. Gradients are added up over ranks in float32, for a layer or for the weights outside the layers.
    """
    layer, outside = layer_part(shape, mesh=mesh), shape.outside_parameters
    held = (outside + (2 if config.distributed.reshard_after_forward else shape.layers) * layer) * width
    return held if config.adapter.kind == "lora" else held + layer * (width + 4)


def held_weights_bytes(config: LachesisConfig, shape: ModelShape, *, width: int) -> int:
    """Return the bytes of the model's weights in the trainer, ``width`` each except for quantized linear layers.

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
    """Return the bytes of one weight in the trainer; ``auto`` is the checkpoint's dtype on GPU, float32 on CPU."""
    dtype = config.model.dtype
    if dtype == "auto":
        dtype = shape.dtype if device == "cuda" else "float32"
    return DTYPE_BYTES.get(dtype, 2)


def checkpoint_bytes(config: LachesisConfig, shape: ModelShape, *, device: str) -> int:
    """Return the bytes of one resumable checkpoint: trained weights, and the optimizer's states."""
    width = weight_bytes(config, shape, device=device)
    trained = trainable_parameters(config, shape)
    return trained * width + _optimizer_bytes(config, shape, trained, width, None)


def host_bytes(config: LachesisConfig, shape: ModelShape, *, device: str, mesh: Mesh) -> int:
    """Return the bytes that all ranks together keep in host memory instead of on their GPUs."""
    if device != "cuda":
        return 0
    width = weight_bytes(config, shape, device=device)
    every, here = (
        sum(
            one.bytes
            for one in _held_parts(config, shape, width=width, device=place, mesh=mesh)
            if one.name in _SHARDED
        )
        for place in ("cpu", device)
    )
    moves_all = config.distributed.cpu_offload and not mesh.whole and mesh.ranks > 1
    return (every if moves_all else every - here) * (mesh.ranks // mesh.cut)


def export_bytes(config: LachesisConfig, shape: ModelShape, *, device: str) -> int:
    """Return the bytes of final/, and of each export of a bridge over the disk: the model, or the adapter."""
    saved = trainable_parameters(config, shape)
    if config.adapter.kind == "none":
        saved = shape.parameters + tower_parameters(config, shape)
    return saved * weight_bytes(config, shape, device=device)


def _optimizer_bytes(config: LachesisConfig, shape: ModelShape, trained: int, width: int, device: str | None) -> int:
    """Return the bytes of moments, and float32 masters of 16-bit weights, on ``device`` (None: anywhere)."""
    optimizer, update = config.optimizer, config.optimizer.weight_update
    masters = 4 * trained if width == 2 and update in ("auto", "fp32_master") else 0
    moment = width if update == "plain" else 4
    if optimizer.function is not None:  # the number of its states is not known: assume AdamW's
        return 2 * moment * trained + masters
    match optimizer.kind:
        case "adamw":
            return 2 * moment * trained + masters
        case "adamw_8bit":
            return 2 * trained + masters
        case "adamw_cpu":
            return 0 if device == "cuda" else 2 * moment * trained + masters
        case "muon":
            # One moment for matrices, two for embeddings and head.
            vocabulary = 0 if config.adapter.kind == "lora" else min(trained, 2 * shape.vocab * shape.hidden)
            return moment * (trained + vocabulary) + masters
        case "adafactor":
            # A row and a column of moments for each matrix, instead of the matrix.
            mean_side = max(1, round((trained / max(1, 7 * shape.layers)) ** 0.5))
            return 4 * 2 * trained // mean_side + masters


def _reference_bytes(config: LachesisConfig, shape: ModelShape, *, width: int) -> int:
    """Return the bytes of a copy for the KL term; 0 for an adapter, whose base model is already loaded."""
    algorithm = config.algorithm
    if not algorithm.holds_reference or algorithm.kl_reference == "sampler":
        return 0
    if config.adapter.kind == "lora":
        return trainable_parameters(config, shape) * width if algorithm.kl_reference == "ema" else 0
    return shape.parameters * width


def _teacher_parts(
    config: LachesisConfig, shape: ModelShape, teachers: Sequence[ModelShape], *, lengths: Lengths, device: str
) -> Iterator[MemoryPart]:
    """Yield the memory of frozen models next to the policy, and of one's outputs per token, doubled for a moment.

    Its own pass keeps nothing for a backward pass, and is over before that of the policy begins.
    """
    if teachers:
        held = sum(one.parameters * weight_bytes(config, one, device=device) for one in teachers)
        yield MemoryPart("teacher", "trainer", ALWAYS, held)
    each = [
        shape.vocab * 2 * 4 if options.top_k is None or options.top_k >= shape.vocab else options.top_k * 2 * (4 + 8)
        for options in config.algorithm.all_teachers.values()
        # The number of logprobs from environments is not known, but small.
        if options.kind != "rollouts" and options.estimate == "exact"
    ]
    if each:
        yield MemoryPart("teacher's logprobs", "trainer", ("passes",), lengths.microbatch * max(each))


def _engine_parts(config: LachesisConfig, shape: ModelShape, *, lengths: Lengths, width: int) -> list[MemoryPart]:
    """Return the memory of one GPU of the engine: its weights, unless shared, and its cache for requests in flight."""
    ways = config.engine.tensor_parallel_size if config.engine.kind == "vllm" else 1
    phases = ("generation",) if sleeps(config) else ALWAYS
    held = _engine_weights(config, shape, width=width) // ways
    # Heads of keys and values are split at most into single heads.
    kept = 1 if config.engine.kind == "vllm" and config.engine.kv_cache_dtype != "auto" else width
    cache = shape.kv_elements_per_token * kept * lengths.in_flight // min(ways, shape.kv_heads)
    parts = [MemoryPart("KV cache", "engine", ("generation",), cache)]
    if config.engine.place == "trainer":
        return parts
    tower = tower_parameters(config, shape) * width
    return [MemoryPart("weights", "engine", phases, held), MemoryPart("vision tower", "engine", phases, tower), *parts]


def _engine_weights(config: LachesisConfig, shape: ModelShape, *, width: int) -> int:
    """Return the bytes of the engine's weights.

    In 8 bits these are a byte per weight of linear layers and a float32 scale per output; else as in the trainer.
    """
    if config.engine.kind != "vllm" or config.engine.quantization == "none":
        return shape.parameters * width
    linear = scales = 0
    for name, (inputs, outputs) in shape.linears.items():
        number = shape.experts if name in ("gate_proj", "up_proj", "down_proj") else 1
        linear += inputs * outputs * number
        scales += 4 * outputs * number
    return shape.parameters * width - shape.layers * (linear * (width - 1) - scales)


def sleeps(config: LachesisConfig) -> bool:
    """Return True if the engine gives its memory back while the trainer computes."""
    return config.engine.kind == "vllm" and config.engine.enable_sleep_mode
