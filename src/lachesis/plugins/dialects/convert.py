"""Converters of another trainer's value to ours that several dialects share."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from lachesis.common.errors import ConfigError, did_you_mean
from lachesis.common.json_values import is_list
from lachesis.config.document import describe
from lachesis.plugins.dialects.words import Words

UNSET: Any = object()
"""Mark of an entry without a different default, or a converter's answer that keeps our default."""


class _Words(Words):
    dtypes: dict[str, str]
    optimizers: dict[str, str]
    schedules: dict[str, str]


_WORDS = _Words.read("words")
DTYPES = _WORDS.dtypes
_ANY_ADDRESS = {"0.0.0.0", "::", "", "localhost"}


def one_of(table: Mapping[str, str], *kept: str) -> Callable[[Any], str]:
    """Return a converter of their word to ours, or to itself; its error for other words names the table's nearest."""

    def convert(value: Any) -> str:
        if value in kept:
            return value
        if isinstance(value, str) and value in table:
            return table[value]
        listed = f"Lachesis has {', '.join(table)}"
        hint = did_you_mean(value, table, otherwise=listed) if isinstance(value, str) else listed
        raise ConfigError(f"{describe(value)} has no counterpart; {hint}")

    return convert


dtype, optimizer, schedule = map(one_of, (DTYPES, _WORDS.optimizers, _WORDS.schedules))
"""Converters of names of formats, and of transformers' names of optimizers and of learning-rate schedules."""
or_muon = one_of(_WORDS.optimizers, "muon")


def switched(on: str, off: str) -> Callable[[Any], Any]:
    """Return a converter of true and false to two words; other values stay."""
    return lambda value: (on if value else off) if isinstance(value, bool) else value


# TRL's older true and false; switches that keep the model off GPUs, compile it, turn adapters on, leave out long
# prompts, and freeze the vision tower.
scale_rewards, on_cpu, compile_mode = switched("group", "none"), switched("cpu", "auto"), switched("on", "off")
lora, dropped, tower = switched("lora", "none"), switched("drop", "error"), switched("frozen", "trained")


def loss_type(value: Any) -> Any:
    """Return our name of TRL's loss; LUSPO is PPO's with another normalization. Raises ConfigError for VESPO."""
    if value == "vespo":
        raise ConfigError(
            "VESPO is here an example of a custom loss: write algorithm.loss: vespo.py:vespo next to a copy of "
            "examples/losses/vespo.py, and loss_type: dapo"
        )
    return "grpo" if value == "luspo" else value


def top_k(value: Any) -> Any:
    """Convert -1, which also means no limit."""
    return 0 if value == -1 else value


def listed(value: Any) -> Any:
    """Return a list; a single text or number becomes a list of one."""
    return [value] if isinstance(value, str | int | float) else value


def held_out(value: Any) -> Any:
    """Return a share below 1 or a count; 0.0 and 20.0 become whole numbers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def nonzero(value: Any) -> Any:
    """Convert 0 or less, which means off, to null."""
    return None if isinstance(value, int | float) and value <= 0 else value


def number(value: Any) -> float:
    """Return a number as a float. Raises ConfigError for anything else, text included."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise ConfigError(f"expected a number, got {describe(value)}")


def checkpointing(value: Any) -> Any:
    """Convert the switch; offloading variants recompute as well."""
    return True if isinstance(value, str) and value.startswith("offload") else value


def module_names(value: Any) -> Any:
    """Split module names in one text, separated by commas or spaces, into a list; ``all-linear`` unchanged."""
    if not isinstance(value, str) or value == "all-linear":
        return value
    return value.replace(",", " ").split()


def layer_numbers(value: Any) -> list[int]:
    """Convert ``20-31``, ``0-3,28-31``, a number or a list of numbers to numbers in order, each once.

    Raises:
        ConfigError: it is none of these, a number is negative, or a range runs backwards.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return [value]
    parts = value.split(",") if isinstance(value, str) else value if is_list(value) else []
    matches = [re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", str(part)) for part in parts]
    ranges = [range(int(match[1]), int(match[2] or match[1]) + 1) if match else () for match in matches]
    if not ranges or not all(ranges):
        raise ConfigError(f"expected layers counted from 0, such as 20-31 or 0-3,28-31, got {describe(value)}")
    return sorted({layer for one in ranges for layer in one})


def devices(value: Any) -> Any:
    """Convert the number of a GPU, or several, to the form of CUDA_VISIBLE_DEVICES."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else value


def engine_address(host: Any, port: Any) -> str:
    """Return the address of a server that binds ``host``: an address for all interfaces means this machine."""
    name = "127.0.0.1" if str(host) in _ANY_ADDRESS else str(host)
    return f"http://[{name}]:{port}" if ":" in name and "[" not in name else f"http://{name}:{port}"


def quoted_number(value: Any) -> Any:
    """Convert a number in quotes: YAML 1.1 reads 1e-6 as text, so files have it there."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def reward_workers(value: Any) -> Any:
    """Return the number of workers; one worker there is the trainer's own thread."""
    return 0 if value == 1 and not isinstance(value, bool) else value


def device(value: Any) -> Any:
    """Convert a device; ``cuda:0`` is the first visible GPU, which the trainer uses."""
    if isinstance(value, str) and value.startswith("cuda:") and value != "cuda:0":
        raise ConfigError(f"{value}: choose the GPU with CUDA_VISIBLE_DEVICES={value[5:]}, and leave --device out")
    return "cuda" if value == "cuda:0" else value


def unless_empty(value: Any) -> Any:
    """Keep our own default if their value is empty, or is switched off by 0."""
    return value or UNSET


def unless_negative(value: Any) -> Any:
    """Keep our own default if theirs is switched off by -1."""
    return UNSET if isinstance(value, int) and value < 0 else value


def frequency(value: Any) -> Any:
    """Convert a number of steps; -1 means never."""
    return max(0, value) if isinstance(value, int) else value


def sampled(value: Any) -> Any:
    """Refuse greedy decoding, which makes all completions of a group equal."""
    if value is False:
        raise ConfigError("completions of a group would be equal: write True")
    return UNSET


def masters(value: Any) -> Any:
    """Convert the format in which weights are updated: with 16 bits there are no masters."""
    if str(value).lower() in ("bf16", "bfloat16"):
        return "plain"
    if str(value).lower() not in ("fp32", "float32"):
        raise ConfigError(f"{describe(value)} has no counterpart; Lachesis has fp32 and bf16")
    return UNSET
