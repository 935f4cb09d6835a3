"""What of a configuration has to change for trainer and engine to fit on one card, the cheapest changes first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from lachesis.common.errors import ConfigError
from lachesis.config.memory import ModelShape, read_shape
from lachesis.config.plan import Plan, plan
from lachesis.config.rules import check
from lachesis.config.schema import LachesisConfig

GB = 10**9
# CUDA's context in each of two processes, and the allocator's fragments.
_CONTEXTS, _FRAGMENTS = 2 * 2**29, 1.05
# A server needs a cache for so many sequences at a time to be of use; more are served in turn.
_SEQUENCES = 16
_SMALL_PASS = 2048

Changes = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Fit:
    """``changes`` by section, none where it fits as it is; ``bytes`` on the card, ``engine`` those of its server."""

    changes: Changes
    bytes: int
    engine: int

    def words(self) -> list[str]:
        """As ``--set`` takes them."""
        return [
            f"{section}={{{', '.join(f'{key}: {_yaml(value)}' for key, value in keys.items())}}}"
            if "kind" in keys and section in ("engine", "bridge", "adapter")
            else f"{section}.{key}={_yaml(value)}"
            for section, keys in self.changes.items()
            for key, value in (list(keys.items())[:1] if "kind" in keys else keys.items())
        ]


def fit(config: LachesisConfig, *, card_gb: float, devices: int = 1) -> Fit | None:
    """The first of a few steps, each taking less memory than the one before, that fits; None where none does.

    Args:
        card_gb: memory of a card, in units of 10^9 bytes.
        devices: that train together, each with its part of trainer and engine.

    Raises:
        ConfigError: the model's shape is not known.
    """
    shape = read_shape(config.model.path)
    if shape is None:
        raise ConfigError(
            f"{config.model.path} has no config.json here, so memory is not known",
            remedy="download its config.json, or name a local directory",
        )
    for changes in _steps(config):
        changed = _changed(config, changes)
        if changed is None:
            continue
        planned = plan(changed, device="cuda", devices=devices)
        found = Fit(changes, bytes=needed(planned), engine=_engine_bytes(planned))
        if found.bytes <= card_gb * GB:
            return found
    return None


def needed(planned: Plan) -> int:
    """Bytes on one card that trainer and engine share, with what no count of tensors has."""
    return int((planned.peak("trainer") + _engine_bytes(planned)) * _FRAGMENTS) + _CONTEXTS


def _engine_bytes(planned: Plan) -> int:
    """Its weights, unless they are the trainer's, and a cache for a few sequences."""
    shape: ModelShape | None = planned.shape
    assert shape is not None, "fit() has seen to it"
    held = sum(part.bytes for part in planned.memory if part.place == "engine" and part.phase == "always")
    cache = sum(part.bytes for part in planned.memory if part.name == "KV cache")
    sequences = max(1, planned.lengths.in_flight // planned.lengths.longest)
    return held + cache * min(_SEQUENCES, sequences) // sequences


def _steps(config: LachesisConfig) -> Iterator[Changes]:
    """Each takes less memory than the one before, and costs more time, or what is trained."""
    yield {}
    small: dict[str, dict[str, Any]] = {
        "model": {"gradient_checkpointing": True},
        "batch": {"max_tokens_per_microbatch": _SMALL_PASS},
    }
    yield small
    if config.adapter.kind == "none":
        yield small | {"optimizer": {"kind": "adamw_8bit"}}
        yield small | {"optimizer": {"kind": "adamw_cpu"}}
    adapter = {} if config.adapter.kind == "lora" else {"adapter": {"kind": "lora", "r": 16, "alpha": 32}}
    if config.engine.place != "trainer":
        yield small | adapter | {"bridge": {"kind": "lora_only", "share_base": True}}
    else:
        yield small | adapter
    if config.source.kind == "local":
        quantized = small | {"model": {"gradient_checkpointing": True, "quantization": "nf4"}} | adapter
        yield quantized | {"engine": {"kind": "embedded"}, "bridge": {"kind": "in_process"}}


def _changed(config: LachesisConfig, changes: Changes) -> LachesisConfig | None:
    """With the changes; None where they do not go together with the rest."""
    data = config.model_dump(mode="json")
    for section, keys in changes.items():
        data[section] = dict(keys) if section in ("engine", "bridge", "adapter") else data[section] | dict(keys)
    try:
        changed = LachesisConfig.model_validate(data)
        check(changed)
    except (ValidationError, ConfigError):
        return None
    return changed


def fit_lines(found: Fit | None, *, card_gb: float) -> list[str]:
    """The answer as text, for a screen."""
    if found is None:
        return [f"nothing tried fits on {card_gb:g} GB: shard over several cards (torchrun), or take a smaller model"]
    share = f", of which {found.engine / GB:.1f} GB are the engine's" if found.engine else ""
    size = f"{found.bytes / GB:.1f} GB of {card_gb:g}{share}"
    if not found.changes:
        return [f"it fits as it is: {size}"]
    return [f"it fits with these: {size}", *(f"  --set '{word}'" for word in found.words())]


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
