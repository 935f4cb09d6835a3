"""verl's and OpenRLHF's configurations, for `lachesis translate`.

Their files are not run as they stand, for their rewards have another signature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lachesis.common.errors import ConfigError
from lachesis.config.document import Document
from lachesis.plugins.dialects import openrlhf, verl
from lachesis.plugins.dialects.openrlhf import OPENRLHF
from lachesis.plugins.dialects.table import Dialect, Translation
from lachesis.plugins.dialects.verl import VERL

OTHER_SYSTEMS: Mapping[str, tuple[Dialect, Callable[[Document], Translation]]] = {
    "verl": (VERL, verl.translate),
    "OpenRLHF": (OPENRLHF, openrlhf.translate),
}
_MARKS: Mapping[str, tuple[str, ...]] = {
    "verl": ("actor_rollout_ref",),
    "OpenRLHF": ("prompt_data", "data.prompt_dataset", "rollout_batch_size", "rollout.batch_size"),
}


def other_system(names: Mapping[str, Any]) -> str | None:
    """Return whose names these are, flat and dotted: "verl", "OpenRLHF", or None for anybody else's."""
    for system, marks in _MARKS.items():
        if any(name == mark or name.startswith(f"{mark}.") for name in names for mark in marks):
            return system
    return None


# ms-swift's arguments that mean the same here, by their names there.
_SWIFT: Mapping[str, str] = {
    "model": "model.path", "dataset": "data.path", "system": "data.system_prompt",
    "num_generations": "sampling.num_generations", "max_completion_length": "sampling.max_completion_length",
    "temperature": "sampling.temperature", "top_p": "sampling.top_p",
    "beta": "algorithm.beta", "epsilon": "algorithm.epsilon", "epsilon_high": "algorithm.epsilon_high",
    "num_iterations": "algorithm.num_iterations", "importance_sampling_level": "algorithm.importance_sampling_level",
    "learning_rate": "optimizer.learning_rate", "warmup_ratio": "optimizer.warmup_ratio", "max_steps": "run.steps",
    "num_train_epochs": "run.epochs", "lora_rank": "adapter.r", "lora_alpha": "adapter.alpha", "seed": "run.seed",
}  # fmt: skip


def require_not_swift(data: Mapping[str, Any]) -> None:
    """Raise ConfigError for ms-swift's arguments, with those of them that mean the same here in our keys."""
    if not {"rlhf_type", "train_type", "tuner_type"} & data.keys():
        return
    same = [f"{ours}: {data[name]}" for name, ours in _SWIFT.items() if isinstance(data.get(name), str | int | float)]
    raise ConfigError(
        "this is a configuration of ms-swift, which is not translated: its rewards and data have another form",
        remedy=f"write a configuration of Lachesis' keys; the same here are {', '.join(same) or 'none of them'}",
    )
