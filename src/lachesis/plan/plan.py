"""Plan of a run, as arithmetic: batches, steps, memory and disk. Loads nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from lachesis.common.errors import ConfigError
from lachesis.config.rules.distributed import require_colocatable, shared_card
from lachesis.config.schema import LachesisConfig
from lachesis.config.schema.mesh import Mesh, derive_mesh, require_experts, require_heads
from lachesis.config.single_sources import single_configs
from lachesis.config.steps import (
    nearest_divisors,
    nearest_multiples,
    prompts_per_generation,
    steps_per_batch,
    with_steps,
)
from lachesis.engines.gpus import is_colocated
from lachesis.plan.memory import (
    ALWAYS,
    Lengths,
    MemoryPart,
    Phase,
    Place,
    checkpoint_bytes,
    export_bytes,
    host_bytes,
    memory_parts,
    offloaded_bytes,
    sleeps,
    trainable_parameters,
)
from lachesis.plan.shapes import FoundShape, ModelShape, find_shape, read_shape, unknown_shape

_ASSUMED_PROMPT = 512


@dataclass(frozen=True, slots=True)
class Batches:
    """Sizes of one optimizer step, and of the run.

    ``completions`` are those of one step; ``micro_batches`` are as many as completions of the longest length need, the
    most possible; ``steps`` is None if the run's length is in epochs of uncounted data. ``start_steps`` on ``answers``
    each come before, without generation. ``prompts`` is None if an environment makes the groups.
    """

    prompts: int | None
    completions: int
    tokens: int
    micro_batches: int
    steps: int | None
    problems: int | None
    transfers: int | None
    evaluations: int | None
    start_steps: int = 0
    answers: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Result of the whole arithmetic.

    Without a config.json ``shape`` and the fields that depend on it are None or empty.

    Memory is that of one of ``devices``: the first one if an engine is in the trainer's process.
    """

    batches: Batches
    lengths: Lengths
    device: str
    shape: ModelShape | None
    trained: int | None
    memory: tuple[MemoryPart, ...]
    checkpoint: int | None
    export: int | None
    exports_kept: int
    checkpoints_kept: int
    notes: tuple[str, ...]
    mesh: Mesh = field(default_factory=Mesh)

    @property
    def devices(self) -> int:
        """Return the number of devices that train together."""
        return self.mesh.ranks

    def peak(self, *places: Place) -> int:
        """Return the peak bytes of tensors of the trainer, the engine, or both together."""
        return max(sum(self.at(phase, *places)) for phase in ALWAYS)

    @property
    def on_disk(self) -> int | None:
        """Return the bytes of the run directory at its largest; None without a config.json."""
        if self.checkpoint is None or self.export is None:
            return None
        return self.checkpoint * self.checkpoints_kept + self.export * (1 + self.exports_kept)

    def at(self, phase: Phase, *places: Place) -> list[int]:
        """Return the bytes of each part that is held in a phase."""
        return [part.bytes for part in self.memory if part.place in places and phase in part.phases]


def plan(
    config: LachesisConfig,
    *,
    device: str | None = None,
    devices: int = 1,
    found: FoundShape | None = None,
    prompt_tokens: int | None = None,
    image_tokens: int = 0,
) -> Plan:
    """Compute the plan of a configuration.

    Args:
        config: with paths resolved; reads the model's config.json, and counts the lines of a JSONL file.
        device: ``cuda`` or ``cpu``; as ``model.device`` says, or what this machine has, if unset.
        devices: the number that train together. found: the model's shape; if unset, it is searched for on this machine
            and in the table of known models.
        prompt_tokens: longest prompt of the data, if known.
        image_tokens: most tokens of images in a prompt; see :func:`with_images`.

    Raises:
        ConfigError: the model's config.json cannot be read, or this number of devices makes no mesh for the
            configuration.
    """
    mesh = derive_mesh(config.distributed, ranks=devices)
    chosen = device or _device(config)
    found = found or find_shape(config.model.path, revision=config.model.revision)
    shape = None if found is None else found.shape
    if shape is not None:
        require_heads(mesh.context, heads=shape.heads, kv_heads=shape.kv_heads)
        require_experts(mesh.expert, experts=shape.experts)
    lengths = _lengths(config, shape, prompt_tokens)
    if shape is not None and shape.tower is not None:
        rows = -(-lengths.microbatch // lengths.longest)
        lengths = replace(lengths, patches=rows * image_tokens * shape.tower.merged)
    batches = _batches(config, lengths)
    teachers = _teachers(config)
    parts = []
    if shape is not None:
        known = [one for one in teachers.values() if one is not None]
        parts = memory_parts(config, shape, lengths=lengths, device=chosen, devices=devices, teachers=known)
    return Plan(
        batches=batches,
        lengths=lengths,
        device=chosen,
        shape=shape,
        trained=None if shape is None else trainable_parameters(config, shape),
        memory=tuple(parts),
        checkpoint=None if shape is None else checkpoint_bytes(config, shape, device=chosen),
        export=None if shape is None else export_bytes(config, shape, device=chosen),
        exports_kept=getattr(config.bridge, "keep_last", -1) + 1,  # including the one being written
        checkpoints_kept=config.checkpoint.keep_last if config.saves_on_the_way else 1,
        notes=(
            *_card_notes(config, device=chosen, devices=devices),
            *_notes(config, batches, lengths=lengths, found=found, prompt_tokens=prompt_tokens),
            *_host_notes(config, shape, lengths=lengths, device=chosen, mesh=mesh),
            *_teacher_notes(teachers),
        ),
        mesh=mesh,
    )


def with_images(config: LachesisConfig) -> LachesisConfig:
    """Return the configuration that a run uses once its data turns out to have images."""
    update = {"vision": config.model.vision or "frozen", "packing": "padded"}
    return config.model_copy(update={"model": config.model.model_copy(update=update)})


def _teachers(config: LachesisConfig) -> dict[str, ModelShape | None]:
    """Return the shape of each model that teaches, or None where its config.json is not at hand."""
    models = [one for one in config.algorithm.all_teachers.values() if one.kind == "model"]
    return {one.model: read_shape(one.model, revision=one.revision) for one in models if one.model}


def _device(config: LachesisConfig) -> str:
    if config.model.device != "auto":
        return config.model.device
    return "cuda" if Path("/dev/nvidia0").exists() else "cpu"


def _lengths(config: LachesisConfig, shape: ModelShape | None, prompt_tokens: int | None) -> Lengths:
    completion = config.sampling.max_completion_length
    context = shape.context if shape is not None else None
    room = max(1, context - completion) if context is not None else _ASSUMED_PROMPT
    limit = _prompt_limit(config)
    prompt = min(room, limit or room, prompt_tokens or limit or _ASSUMED_PROMPT)
    longest = prompt + completion
    if config.source.kind == "atropos":
        longest = config.source.max_sequence_length
    rows = config.batch.micro_batch_size
    budget = config.batch.max_tokens_per_microbatch
    most = _completions(config) * longest
    microbatch = max(longest, min(most, budget if rows is None else min(budget, rows * longest)))
    in_flight = _completions(config) * config.batch.steps_per_generation
    if config.engine.kind == "embedded" or config.engine.kind == "embedded_server":
        in_flight = min(in_flight, config.engine.max_batch_size)
    keys = _keys_per_token(config, prompt=prompt, completion=longest - prompt, tokens=microbatch)
    if config.engine.kind == "vllm":  # divided among the copies of the model
        in_flight = -(-in_flight // config.engine.data_parallel_size)
    return Lengths(longest=longest, microbatch=microbatch, in_flight=in_flight * longest, keys=keys)


def _prompt_limit(config: LachesisConfig) -> int | None:
    """Return the largest ``data.max_prompt_length`` of all sources; None if one has none."""
    limits = [one.data.max_prompt_length for one in single_configs(config).values()]
    return None if None in limits else max(limit for limit in limits if limit is not None)


def _keys_per_token(config: LachesisConfig, *, prompt: int, completion: int, tokens: int) -> float:
    """Return keys per token of a full micro-batch: each completion of a group sees the one prompt's keys."""
    together = min(config.sampling.num_generations, (tokens - prompt) // max(1, completion))
    if together < 2 or config.model.packing == "padded":
        return 1.0
    return (prompt + together * (prompt + completion)) / (prompt + together * completion)


def _completions(config: LachesisConfig) -> int:
    """Return the completions of one optimizer step."""
    if config.source.kind == "atropos" and config.source.batch_size is not None:
        return config.source.batch_size
    return config.batch.prompts_per_step * config.sampling.num_generations


def _batches(config: LachesisConfig, lengths: Lengths) -> Batches:
    completions = _completions(config)
    tokens = completions * lengths.longest
    per_pass = max(1, config.batch.max_tokens_per_microbatch // lengths.longest)
    if config.batch.micro_batch_size is not None:
        per_pass = min(per_pass, config.batch.micro_batch_size)
    problems = _count_problems(config)
    if problems is not None:
        config = with_steps(config, problems=problems)
    steps, start = config.run.steps, config.sft_steps
    total = None if steps is None else start + steps
    every, evaluate = getattr(config.bridge, "every_steps", 1), config.evaluation.every_steps
    return Batches(
        prompts=None if config.source.kind == "atropos" else config.batch.prompts_per_step,
        completions=completions,
        tokens=tokens,
        micro_batches=-(-completions // per_pass),
        steps=steps,
        problems=problems,
        transfers=None if total is None else total // every,
        evaluations=None
        if total is None
        else 2 + ((total - 1) // evaluate if evaluate else 0)
        if any(one.data.evaluates for one in single_configs(config).values())
        else 0,
        start_steps=start,
        answers=config.sft.batch_size if start else 0,
    )


def _count_problems(config: LachesisConfig) -> int | None:
    """Count the lines of a single local JSONL file, without those held out; None for everything else."""
    data = config.data
    if data.path is None or data.more or not data.path.endswith(".jsonl") or not Path(data.path).is_file():
        return None
    with open(data.path, "rb") as file:
        lines = sum(1 for line in file if line.strip())
    if data.eval_path is not None or data.eval_split is not None:
        return lines
    held_out = data.eval_size if data.eval_size >= 1 else round(data.eval_size * lines)
    return max(0, lines - int(held_out))


def _notes(
    config: LachesisConfig, batches: Batches, *, lengths: Lengths, found: FoundShape | None, prompt_tokens: int | None
) -> Iterator[str]:
    """Yield notes on sizes that do not divide evenly, with the nearest that do, and on unknown sizes."""
    shape = None if found is None else found.shape
    uses = steps_per_batch(config)
    if batches.steps is not None and batches.steps % uses:
        fitting = " or ".join(map(str, nearest_multiples(batches.steps, of=uses)))
        yield f"{batches.steps} steps are not a multiple of the {uses} steps of a generation; {fitting} are"
    prompts = prompts_per_generation(config)
    if batches.problems and batches.problems % prompts:
        fitting = " or ".join(map(str, nearest_divisors(batches.problems, prompts)))
        yield (
            f"{batches.problems} problems are not a multiple of the {prompts} prompts that are generated at once, so "
            f"one batch spans two epochs{f'; {fitting} divide them' if fitting else ''}"
        )
    if config.source.kind == "atropos" and batches.completions % config.sampling.num_generations:
        group = config.sampling.num_generations
        fitting = " or ".join(map(str, nearest_multiples(batches.completions, of=group)))
        yield (
            f"source.batch_size {batches.completions} is not a multiple of sampling.num_generations {group}: groups of "
            f"that size would not fit; {fitting} is (the environment says how large groups are)"
        )
    rows = config.batch.micro_batch_size
    if rows is not None and batches.completions % rows:
        fitting = " or ".join(map(str, nearest_divisors(batches.completions, rows)))
        yield (
            f"the last micro-batch is smaller: batch.micro_batch_size {rows} does not divide {batches.completions}; "
            f"{fitting} do"
        )
    if config.source.kind in ("local", "agent"):
        yield from _prompt_notes(config, lengths=lengths, shape=shape, prompt_tokens=prompt_tokens)
    yield from _missing_data(config)
    if config.optimizer.function is not None and shape is not None:
        yield "the size of optimizer.function's state is not known: AdamW's is assumed"
    if batches.steps is None:
        yield "the steps of run.epochs depend on the number of problems, which is known once the data is read"
    if found is None:
        unknown = unknown_shape(config)
        yield f"{unknown.message}; {unknown.remedy}"
    elif found.source == "table":
        yield f"{config.model.path} has no config.json here: its shape comes from the table of known models"


def _missing_data(config: LachesisConfig) -> Iterator[str]:
    """Yield a note for each file or directory of data that is not here."""
    sections = [one.data for one in single_configs(config).values()]
    paths = [path for data in sections for one in (data, *data.more) for path in (one.path, data.eval_path)]
    for path in dict.fromkeys(paths):
        if path is not None and Path(path).is_absolute() and not Path(path).exists():  # ids of the hub are relative
            then = ", so the run would be refused" if config.run.setup is None else ": run.setup has to write it"
            yield f"{path} does not exist{then}"


def _card_notes(config: LachesisConfig, *, device: str, devices: int) -> Iterator[str]:
    """Yield notes on an engine that shares a card with a rank."""
    if device != "cuda":
        return
    shared = shared_card(config, ranks=devices, environment=os.environ)
    if shared is not None:
        yield shared
    if is_colocated(config, ranks=devices):
        yield _beside_words(config, devices=devices)
    elif devices > 1 and config.engine.kind == "vllm" and config.engine.devices is None and not config.shares_weights:
        yield (
            f"vLLM is only on the first of the {devices} devices, and the others wait while it generates; "
            f"engine.data_parallel_size: {devices} puts a copy of the model on each"
        )


def _beside_words(config: LachesisConfig, *, devices: int) -> str:
    """Describe the effect of an engine on the GPUs of all ranks, or the reason why it cannot be there."""
    try:
        require_colocatable(config, ranks=devices, here=devices)
    except ConfigError as error:
        return f"{error.message}; {error.remedy}"
    beside = f"vLLM is on the GPUs of the {devices} devices, with a worker on each (engine.devices is unset)"
    if sleeps(config):
        return (
            f"{beside}: it sleeps while they train; their weights and optimizer states stay there while it generates, "
            "unless distributed.cpu_offload is true"
        )
    return f"{beside}, and holds its share while they train; with engine.enable_sleep_mode it gives it back meanwhile"


def _host_notes(
    config: LachesisConfig, shape: ModelShape | None, *, lengths: Lengths, device: str, mesh: Mesh
) -> Iterator[str]:
    """Yield notes on the host memory that is needed besides the card."""
    waiting = 0 if shape is None else offloaded_bytes(config, shape, lengths=lengths, device=device, mesh=mesh)
    if waiting:
        ranks = f" for each of the {mesh.ranks} devices; those of one host add up" if mesh.ranks > 1 else ""
        yield f"model.activations: offload takes {size_text(waiting)} of the host's memory{ranks}, which is pinned"
    kept = 0 if shape is None else host_bytes(config, shape, device=device, mesh=mesh)
    if kept:
        key = (
            "distributed.cpu_offload" if config.distributed.cpu_offload else f"optimizer.kind: {config.optimizer.kind}"
        )
        yield f"{key} keeps {size_text(kept)} in host memory" + ", over all devices" * (mesh.ranks > 1)


def _teacher_notes(teachers: Mapping[str, ModelShape | None]) -> Iterator[str]:
    """Yield a note for each teacher whose memory is unknown."""
    for name, shape in teachers.items():
        if shape is None:
            yield f"the teacher {name} has no config.json here: its weights are not counted"


def _prompt_notes(
    config: LachesisConfig, *, lengths: Lengths, shape: ModelShape | None, prompt_tokens: int | None
) -> Iterator[str]:
    """Yield notes on the possible lengths of prompts."""
    completion = config.sampling.max_completion_length
    if shape is not None and shape.context is not None and completion >= shape.context:
        yield (
            f"sampling.max_completion_length {completion} leaves no room for a prompt in the model's context of "
            f"{shape.context} tokens, so the run would be refused; lower it"
        )
    elif _prompt_limit(config) is None and prompt_tokens is None:
        prompt = lengths.longest - completion
        yield f"data.max_prompt_length is unset: prompts of up to {prompt} tokens are assumed"


def size_text(count: int) -> str:
    """Format bytes in a suitable unit of 1,000."""
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"
