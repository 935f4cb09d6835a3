"""Names that TRL's and Axolotl's files share: those of TRL's GRPOConfig, in Axolotl below ``trl:``.

This has the batch arithmetic too, from their rows, accumulation and processes to prompts in an optimizer step, and
the choice of engine and bridge.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from lachesis.common.world import HOW_TO_START
from lachesis.config.document import describe
from lachesis.config.presets import PRESETS
from lachesis.config.schema import SamplingConfig
from lachesis.config.steps import nearest_divisors, nearest_multiples
from lachesis.plugins.dialects.convert import DTYPES, engine_address
from lachesis.plugins.dialects.table import Translation
from lachesis.plugins.dialects.words import Words

_PROCESSES = "num_processes"
_EPSILON = 0.2  # of TRL's GRPOConfig
_SERVER_WAIT_S = 240.0  # vllm_server_timeout of TRL's GRPOConfig


class _Words(Words):
    schedule_options: dict[str, str]
    schedule_defaults: dict[str, str | float]
    of_decay: list[str]


_WORDS = _Words.read("grpo")


def put_address(translation: Translation, name: str, port: Any) -> str:
    """Return the URL of the server on the host under ``name``; a host that is already a URL is a problem."""
    host = translation.text(name, "0.0.0.0")
    if "/" in host or host.count(":") == 1:
        translation.problem(name, f"expected the name or address of a host, got {host!r}; ports have their own key")
    return engine_address(host, port)


def put_algorithm(
    translation: Translation, prefix: str, *, optimizer: str, alpha: float, steps: int, mode: str | None, floor: bool
) -> None:
    """Set rewards, loss, reference, the correction for a separate sampler, and the display of completions.

    Args:
        translation: of the document.
        prefix: of the names.
        optimizer: their name for it. alpha, steps: defaults there of an averaged reference.
        mode: default there of the correction; ``None`` if there is none. floor: True if truncation has the floor 1 /
            cap there. (There, masks get it too, which undoes them; here a mask masks.)
    """
    # Reward functions get completions of text prompts as text, and those of conversations as messages.
    translation.put("rewards.text_completions", "text", f"{prefix}reward_funcs")
    # bitsandbytes moves these optimizers' states to the CPU if the GPU is full.
    if str(translation.value(optimizer)).startswith("paged_"):
        paged = "its states are not paged out when memory is short; optimizer.kind adamw_cpu keeps them on the CPU"
        translation.note(optimizer, paged)
    loss, bound = f"{prefix}loss_type", f"{prefix}epsilon_high"
    if translation.value(loss) == "cispo" and not translation.has(bound):
        told = translation.value(f"{prefix}epsilon", _EPSILON)
        translation.put("algorithm.epsilon_high", told, bound)
        ours = PRESETS["cispo"]["algorithm.epsilon_high"]
        setting = translation.document.setting(bound, ours)
        translation.note(loss, f"TRL bounds the ratio by {told} without {bound}; Lachesis' own is {ours} ({setting})")
    if translation.value(loss) == "luspo":
        translation.put("algorithm.normalization", "sequence_sum", loss)
    if translation.value(f"{prefix}sync_ref_model"):
        translation.put("algorithm.kl_reference", "ema", f"{prefix}sync_ref_model")
        translation.put_entry(f"{prefix}ref_model_mixup_alpha", alpha)
        translation.put_entry(f"{prefix}ref_model_sync_steps", steps)
    if mode is not None and translation.value(f"{prefix}use_vllm"):
        _put_sampler_correction(translation, prefix, mode=mode, floor=floor)
    _put_generation_kwargs(translation, f"{prefix}generation_kwargs")
    _put_completions(translation, prefix)


def _put_sampler_correction(translation: Translation, prefix: str, *, mode: str, floor: bool) -> None:
    """Set the correction for a separate sampler, which is on by default; see :func:`put_algorithm`."""
    keys = ("correction", "mode", "cap", "clip_max", "clip_min")
    names = {key: f"{prefix}vllm_importance_sampling_{key}" for key in keys}
    if translation.switch(names["correction"]) is False:
        translation.put("algorithm.sampler_correction", "none", names["correction"])
        return
    chosen = translation.value(names["mode"], mode)
    translation.put("algorithm.sampler_correction", chosen, names["mode"])
    source = names["cap"] if translation.has(names["cap"]) else names["clip_max"]
    cap = translation.value(source, 3.0)
    translation.put("algorithm.sampler_correction_max", cap, source)
    if translation.has(names["clip_min"]):
        translation.copy(names["clip_min"], "algorithm.sampler_correction_min")
    elif floor and str(chosen).endswith("truncate") and isinstance(cap, int | float) and cap > 0:
        translation.put("algorithm.sampler_correction_min", 1 / cap, source)


def _put_completions(translation: Translation, prefix: str) -> None:
    """Set the number of completions shown: the given one, or all; none unless they are requested."""
    if translation.switch(f"{prefix}log_completions"):
        name = f"{prefix}num_completions_to_print"
        translation.put("logging.completions", translation.value(name, "all"), name)


def _put_generation_kwargs(translation: Translation, name: str) -> None:
    """Set fields of vLLM's SamplingParams; those that all engines here support have their own keys."""
    fields = translation.mapping(name)
    known = {name: name for name in SamplingConfig.model_fields}
    known |= {"max_tokens": "max_completion_length", "n": "num_generations"}
    own = {field: value for field, value in fields.items() if field in known and field != "generation_kwargs"}
    for field, value in own.items():
        translation.put(f"sampling.{known[field]}", value, name)
    rest = {field: value for field, value in fields.items() if field not in own}
    if rest:
        translation.put("sampling.generation_kwargs", rest, name)


def put_every(translation: Translation, name: str, path: str) -> None:
    """Set a number of steps, given as one or as a share of ``max_steps`` below 1."""
    value = translation.value(name)
    if value is None:
        return
    steps = translation.value("max_steps")
    if isinstance(value, float) and 0 < value < 1 and isinstance(steps, int):
        value = max(1, round(value * steps))
    translation.put(path, int(value) if isinstance(value, float) and value.is_integer() else value, name)


def put_per_epoch(translation: Translation, name: str, path: str) -> None:
    """Set a frequency, given as times in an epoch, as the share of an epoch between two times."""
    times = translation.whole(name, 1)
    if times is not None:
        translation.put(path, 1 / times, name)


def put_strategy(translation: Translation, name: str, strategy: object, section: str, *, default_steps: int) -> bool:
    """Set when checkpoints or evaluations are made: each epoch, each N steps, or never; return True if any are.

    Args:
        translation: of the document.
        name: of the key.
        strategy: its value.
        section: ours, ``checkpoint`` or ``evaluation``.
        default_steps: N, if their file says steps without a number.
    """
    if strategy == "epoch":
        translation.put(f"{section}.every_epochs", 1.0, name)
    elif strategy == "steps":
        translation.put(f"{section}.every_steps", default_steps, name)
    elif strategy == "best":
        translation.warning(name, f"{strategy}: Lachesis counts in steps or epochs; write steps, epoch or no")
    elif strategy not in ("no", False):
        translation.problem(name, f"expected one of steps, epoch, no, got {describe(strategy)}")
    return strategy in ("epoch", "steps")


def put_output_dir(translation: Translation, name: str, default: str | None = None) -> None:
    """Set the directory of runs and the run's name from their run directory; ``.`` has no name."""
    directory = translation.value(name, default)
    path = PurePath(str(directory))
    if directory is not None and (not isinstance(directory, str) or path.name in ("", "..")):
        translation.problem(name, f"expected a directory for the run alone, got {describe(directory)}")
    elif directory is not None:
        translation.put("run.dir", str(path.parent), name)
        translation.put("run.name", path.name, name)


def put_quantization(translation: Translation) -> None:
    """Set the quantization by bitsandbytes' switches."""
    for name, quantization in (("load_in_8bit", "int8"), ("load_in_4bit", "nf4")):
        if translation.value(name):
            translation.put("model.quantization", quantization, name)


def put_dtype(translation: Translation, *names: str, others: tuple[str, ...] = ()) -> None:
    """Set the dtype by the switches; the last one that is on counts, but two 16-bit formats together are refused."""
    on = [name for name in names if translation.switch(name, *others) is True]
    halves = [name for name in on if DTYPES[name] != "float32"]
    if len({DTYPES[name] for name in halves}) > 1:
        translation.problem(halves[-1], f"true, and so is {halves[0]}: weights have one dtype; set one to false")
    for name in on:
        translation.put("model.dtype", DTYPES[name], name)


def put_run(
    translation: Translation, *, epochs: str, default_epochs: float, schedule: str, default_rate: float | None = None
) -> None:
    """Set the run's length and directory, AdamW's decays and the options of the schedule.

    Args:
        translation: of the document.
        epochs, schedule: their names for the epochs, which count if no steps are given, and for the schedule.
        default_epochs, default_rate: theirs.
    """
    steps = translation.value("max_steps")
    if steps is not None and steps != -1:
        translation.put("run.steps", steps, "max_steps")
    else:
        translation.put("run.epochs", translation.value(epochs, default_epochs), epochs)
    put_output_dir(translation, "output_dir")
    first, second = "adam_beta1", "adam_beta2"
    if translation.has(first) or translation.has(second):
        pair = [translation.value(first, 0.9), translation.value(second, 0.999)]
        translation.put("optimizer.betas", pair, first if translation.has(first) else second)
    _put_schedule(translation, schedule, default_rate)


def _put_schedule(translation: Translation, schedule: str, default_rate: float | None) -> None:
    """Set the options of the schedule in ``lr_scheduler_kwargs``, by the names of transformers' functions."""
    name = "lr_scheduler_kwargs"
    options = translation.mapping(name)
    kind, peak = translation.value(schedule), translation.value("learning_rate", default_rate)
    for key, value in options.items():
        path = _WORDS.schedule_options.get(key)
        if value is None or _WORDS.schedule_defaults.get(key) == value:
            continue
        if key == "min_lr" and isinstance(value, int | float) and isinstance(peak, int | float) and peak > 0:
            translation.put("optimizer.min_lr_ratio", value / peak, name)
        elif path is None or (path in _WORDS.of_decay and kind != "warmup_stable_decay"):
            translation.problem(name, f"{key} has no counterpart with {schedule} {kind}; remove it")
        else:
            translation.put(path, value, name)


def put_batch(
    translation: Translation, *, rows: str, generations: str, default_rows: int, processes: int | None, sharing: int = 1
) -> int:
    """Set ``batch.prompts_per_step`` and ``batch.micro_batch_size``; the processes that were counted.

    One optimizer step there has rows x accumulation x processes completions (TRL's GRPOConfig), which must be whole
    groups: prompts_per_step is that divided by the group size, without a remainder. A file may be for several processes
        even if none were started: its own number counts, or the fewest that make whole groups. ``sharing`` processes
        that compute sequences together count as one.
    """
    accumulation = "gradient_accumulation_steps"
    written = translation.whole(_PROCESSES, 1)
    micro = translation.whole(rows, default_rows)
    steps = translation.whole(accumulation, 1)
    group = translation.whole(generations, 8)
    counted = max(1, (processes or written or 1) // sharing)
    if micro is None or steps is None or group is None:
        return counted
    if processes is None and not translation.has(_PROCESSES):
        counted = group // math.gcd(micro * steps, group)
    completions = micro * steps * counted
    translation.put("batch.micro_batch_size", micro, rows)
    if completions % group == 0:
        translation.put("batch.prompts_per_step", completions // group, accumulation)
        if processes is None and counted > 1:
            _say_processes(translation, accumulation, counted, completions, group)
        return counted
    text = f"{rows} {micro} x {accumulation} {steps} x {counted} process{'es' if counted > 1 else ''} = {completions}"
    fitting = _fitting_batches(micro * counted, steps, group, names=(accumulation, generations))
    translation.problem(
        accumulation,
        f"{text} completions in a step, not a multiple of {generations} {group}; the nearest that fit: {fitting}",
    )
    return counted


def _say_processes(translation: Translation, name: str, processes: int, completions: int, group: int) -> None:
    step = f"an optimizer step also has their {completions} completions ({completions // group} prompts) on one device"
    if translation.has(_PROCESSES):
        translation.note(_PROCESSES, f"{step}; several devices train with {HOW_TO_START}")
        return
    translation.warning(
        name,
        f"one process would not make whole groups of {group}, so {processes} are assumed, the fewest that do: {step}; "
        f"{translation.document.setting(_PROCESSES, 'N')} sets another number",
    )


def _fitting_batches(unit: int, steps: int, group: int, *, names: tuple[str, str]) -> str:
    """Return the nearest accumulation steps and group sizes with which ``unit`` rows a pass make whole groups."""
    # A group is whole after this many accumulation steps, and after every multiple of them.
    valid = [number for number in range(1, steps + group + 1) if unit * number % group == 0]
    below, above = [n for n in valid if n < steps][-1:], [n for n in valid if n > steps][:1]
    sizes = nearest_divisors(unit * steps, group)
    choices = [f"{names[0]} {' or '.join(map(str, below + above))}"]
    choices += [f"{names[1]} {' or '.join(map(str, sizes))}"] if sizes else []
    return ", or ".join(choices)


def check_generation_batch(translation: Translation, name: str, *, prompts: int | None, meaning: str) -> None:
    """Set several optimizer steps for one generation, if a file asks for them.

    Their generation may also be smaller than a step: then a step there is made of several generations by the
    same weights, which here are one.

    Args:
        translation: of the document.
        name: their key. prompts: its value in prompts; None if it is invalid.
        meaning: unit of their key.
    """
    step = translation.document.data.get("batch", {}).get("prompts_per_step")
    if prompts is None or step is None:
        return
    if prompts and prompts % step and step % prompts:
        fitting = " or ".join(map(str, nearest_multiples(prompts, of=step)))
        translation.problem(
            name,
            f"{prompts} prompts ({meaning}) is not a multiple of the {step} prompts of an optimizer step; the nearest "
            f"that fit: {fitting} prompts, or a divisor of {step}",
        )
        return
    if prompts > step:
        translation.put("batch.steps_per_generation", prompts // step, name)


def put_generation(
    translation: Translation, prompts: int | None, step: int | None, *, written: str, part: str, counted: Sequence[str]
) -> None:
    """Set the prompts of one generation as whole optimizer steps, both in prompts; None means an invalid value.

    ``counted`` are our keys whose values are generations there: each is several optimizer steps, in which ours count.
    """
    if prompts is None or step is None:
        return
    if prompts % step:
        fitting = " or ".join(map(str, nearest_multiples(prompts, of=step)))
        text = f"{prompts} prompts are not a multiple of the {step} of an optimizer step; {fitting} are"
        translation.problem(written, text)
        return
    translation.put("batch.prompts_per_step", step, part)
    if prompts > step:
        translation.put("batch.steps_per_generation", prompts // step, written)
    data = translation.document.data
    each = prompts // step * data.get("algorithm", {}).get("num_iterations", 1)
    for path in counted:
        section, _, key = path.partition(".")
        if isinstance(count := data.get(section, {}).get(key), int) and isinstance(each, int):
            data[section][key] = count * each


def put_serving(
    translation: Translation, prefix: str, *, default_mode: str, url: str, url_name: str, managed: Mapping[str, str]
) -> None:
    """Set ``engine`` and ``bridge``.

    Without vLLM: the embedded engine. ``server``: the server at that address, to which the adapter is swapped or
    all weights are sent. ``colocate``: a vLLM server that the run starts on the trainer's GPU, with the same bridges.

    Args:
        translation: of the document.
        prefix: of TRL's names.
        default_mode: theirs.
        url: the server's address, for mode server; ``url_name`` is its place. managed: options of a server that the run
            starts, their names to ours below ``engine.``.
    """
    names = ("use_vllm", "vllm_mode", "vllm_server_timeout", "vllm_lora_sync", "vllm_sync_interval")
    use_vllm, mode, timeout, adapter_only, interval = (f"{prefix}{name}" for name in names)
    swapped_by = adapter_only if translation.value(adapter_only) else None
    if not translation.value(use_vllm):
        if options := [name for name in (mode, interval, *managed) if translation.has(name)]:
            text = f"nothing to do: {use_vllm} is off, so the trainer itself generates"
            translation.note(", ".join(options), text)
        return
    chosen = translation.value(mode, default_mode)
    if chosen == "server":
        translation.put("engine.kind", "http", use_vllm)
        translation.put("engine.urls", [url], url_name)
        translation.put("engine.wait_s", translation.value(timeout, _SERVER_WAIT_S), timeout)
        if options := [name for name in managed if translation.has(name) and name != url_name]:
            translation.note(", ".join(options), "for the server (`lachesis vllm-serve`); the trainer does not need it")
    elif chosen == "colocate":
        translation.put("engine.kind", "vllm", mode)
        for name, option in managed.items():
            translation.copy(name, f"engine.{option}")
        _put_device(translation, f"{prefix}vllm_device")
        _make_room(translation, [name for name, option in managed.items() if option == "max_model_len"])
    else:
        translation.problem(mode, f"expected server or colocate, got {chosen!r}")
        return
    translation.put("bridge.kind", "lora_only" if swapped_by else "broadcast", swapped_by or use_vllm)
    translation.copy(interval, "bridge.every_steps")


def _make_room(translation: Translation, names: Sequence[str]) -> None:
    """Raise the context to the longest prompt plus completion: a full engine cuts the completion or refuses it."""
    data, engine = translation.document.data, translation.document.data.get("engine", {})
    prompt, room = data.get("data", {}).get("max_prompt_length"), engine.get("max_model_len")
    completion = data.get("sampling", {}).get("max_completion_length", SamplingConfig().max_completion_length)
    if not all(isinstance(length, int) for length in (prompt, completion, room)):
        return  # one is missing, or is not a number, which is reported at its place
    if prompt + completion > room:
        name = next(name for name in reversed(names) if translation.has(name))
        translation.put("engine.max_model_len", prompt + completion, name)
        translation.note(name, f"{prompt + completion} instead of {room}: the longest prompt and completion need it")


def _put_device(translation: Translation, name: str) -> None:
    """Set the device: ``cuda:N`` as in CUDA_VISIBLE_DEVICES; ``auto`` was the first GPU that nothing trains on."""
    value = translation.value(name)
    if value == "auto":
        translation.note(
            name,
            f"the engine is on the trainer's own GPU; {translation.document.setting('engine.devices', 'N')} moves it",
        )
    elif value not in (None, "cuda"):
        number = re.fullmatch(r"cuda:(\d+)", str(value))
        if number is None:
            translation.problem(name, f"expected auto or cuda:N, got {describe(value)}")
        else:
            translation.put("engine.devices", number[1], name)
