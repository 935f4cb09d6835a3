"""Sharding in other trainers' terms: FSDP's options, DeepSpeed's file, the size of a group.

They set ``distributed``, which takes effect if several processes train. DeepSpeed itself is not used: its ZeRO
stages are ways of sharding that FSDP2 has too. The file that `accelerate launch --config_file` takes is known, so that
it can be explained and refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lachesis.common.errors import ConfigError
from lachesis.common.json_values import is_list, is_object
from lachesis.common.world import HOW_TO_START
from lachesis.config.document import describe
from lachesis.plugins.dialects.table import Dialect, Translation, read_names
from lachesis.plugins.dialects.words import Words

# Axolotl's sizes of groups of devices.
_GROUPS = ("dp_shard_size", "dp_replicate_size")
# The devices that share a sequence, and the older name for them.
CONTEXTS = ("context_parallel_size", "sequence_parallel_degree")


class _Strategy(NamedTuple):
    """Our strategy, and, if it shards, True if weights are freed between forward and backward."""

    strategy: str
    reshard: bool | None = None


class _Words(Words):
    strategies: dict[str, _Strategy]
    numbered: dict[str, str]
    said_elsewhere: frozenset[str]


_WORDS = _Words.read("fsdp")
# FSDP's own options, with and without the prefix that they have in some files, and the keys that they set.
_OPTIONS = {entry.name: entry.path for entry in read_names("fsdp") if entry.treatment == "together"}


def put_distributed(translation: Translation, options: Mapping[str, tuple[str, Any]], *, processes: int) -> None:
    """Set ``distributed`` as ``fsdp``, its options and ``deepspeed`` say.

    Args:
        options: FSDP's, by their names without prefix: their places and values. processes: number that train.
    """
    words, stage = translation.value("fsdp"), translation.value("deepspeed")
    if words and stage:
        translation.problem("deepspeed", "shards in another way than fsdp; keep one of them")
        return
    if words:
        _put_words(translation, words)
    for option, (name, value) in options.items():
        _put_option(translation, option, name, value)
    if stage:
        _put_deepspeed(translation, stage)
    names = ("fsdp", "deepspeed", *_GROUPS, *(name for name, _ in options.values()))
    asked = next((name for name in names if translation.has(name) and translation.value(name)), None)
    if asked is not None and processes == 1:
        translation.warning(asked, f"one process trains on one device, unsharded; start several with {HOW_TO_START}")


def put_context(translation: Translation) -> int:
    """Set the number of devices that share a sequence, which is a number of processes."""
    asked = {name: translation.whole(name, 1) or 1 for name in CONTEXTS if translation.value(name) is not None}
    if len({*asked.values()}) > 1:
        translation.problem(CONTEXTS[1], f"differs from {CONTEXTS[0]}; keep one of them")
    for name, size in asked.items():
        translation.put("distributed.context_parallel_size", size, name)
    return max(asked.values(), default=1)


def option_of(name: str) -> str:
    """Return an option without the prefix that some files give it."""
    return name.removeprefix("fsdp_")


def is_known_option(name: str) -> bool:
    return option_of(name) in _OPTIONS


def _put_words(translation: Translation, words: Any) -> None:
    """``fsdp``: a list or a line of words; true is the default, full sharding."""
    found: object = words.replace(",", " ").split() if isinstance(words, str) else [] if words is True else words
    if not is_list(found):
        translation.problem("fsdp", f"expected words such as full_shard auto_wrap, got {describe(words)}")
        return
    if "offload" in found:
        translation.put("distributed.cpu_offload", True, "fsdp")
    strategies = [word for word in found if word not in ("auto_wrap", "offload")]
    _put_strategy(translation, "fsdp", strategies[0] if strategies else "full_shard")


def _put_strategy(translation: Translation, name: str, word: Any) -> None:
    strategy = _WORDS.numbered.get(str(word), str(word).lower())
    if strategy not in _WORDS.strategies:
        translation.problem(name, f"{describe(word)} has no counterpart; Lachesis has {', '.join(_WORDS.strategies)}")
        return
    ours, reshard = _WORDS.strategies[strategy]
    translation.put("distributed.strategy", ours, name)
    if reshard is not None:
        translation.put("distributed.reshard_after_forward", reshard, name)
    if strategy.startswith("hybrid") and not any(translation.has(name) for name in _GROUPS):
        translation.warning(name, "shards over all devices; set distributed.shard_size to the GPUs of a node")


def _put_option(translation: Translation, option: str, name: str, value: Any) -> None:
    if value is None:
        return
    if option == "sharding_strategy" or (option == "reshard_after_forward" and isinstance(value, str)):
        _put_strategy(translation, name, value)
        return
    if not isinstance(value, bool):
        translation.problem(name, f"expected true or false, got {describe(value)}")
    elif option != "activation_checkpointing" or value:
        translation.put(_OPTIONS[option], value, name)


def _put_deepspeed(translation: Translation, value: Any) -> None:
    try:
        content = value if is_object(value) else _read(str(value))
    except ConfigError as error:
        translation.problem("deepspeed", error.message)
        return
    zero: object = content.get("zero_optimization") or {}
    stage = zero.get("stage", 0) if is_object(zero) else None
    if not is_object(zero) or stage not in (0, 1, 2, 3):
        translation.problem("deepspeed", f"zero_optimization.stage is {describe(stage)}; expected 0 to 3")
        return
    translation.put("distributed.strategy", "replicate" if stage == 0 else "shard", "deepspeed")
    if stage > 0:
        translation.put("distributed.reshard_after_forward", stage == 3, "deepspeed")
    places = {_offload_device(zero, part) for part in ("offload_optimizer", "offload_param")} - {"none"}
    if places:
        translation.put("distributed.cpu_offload", True, "deepspeed")
    if "nvme" in places:
        translation.warning("deepspeed", "Lachesis offloads to CPU memory, not to NVMe")
    rest = sorted(str(key) for key in content.keys() - _WORDS.said_elsewhere)
    meaning = f"ZeRO stage {stage}, by FSDP2: DeepSpeed is not used" if stage else "no sharding: DeepSpeed is not used"
    translation.note("deepspeed", meaning + (f", and {', '.join(rest)} of its file have no effect" if rest else ""))


def _offload_device(zero: Mapping[str, Any], part: str) -> str:
    section = zero.get(part)
    if part == "offload_optimizer" and zero.get("cpu_offload") is True:  # the older form
        return "cpu"
    return str(section.get("device", "none")) if is_object(section) else "none"


def _read(path: str) -> Mapping[str, Any]:
    """Read a DeepSpeed file; a missing one that is named like Axolotl's own (``zero3_bf16.json``) is known by its name.

    Raises:
        ConfigError: it is missing and has another name, or is not a JSON object.
    """
    file = Path(path)
    named = re.match(r"zero([0-3])(?![0-9])", file.name)
    if not file.is_file() and named:
        offloads = "cpuoffload" in file.name
        return {"zero_optimization": {"stage": int(named[1])} | ({"cpu_offload": True} if offloads else {})}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not is_object(content):
        raise ConfigError(f"{path} holds {describe(content)}, not an object")
    return content


ACCELERATE = Dialect("accelerate", list(read_names("accelerate")))
