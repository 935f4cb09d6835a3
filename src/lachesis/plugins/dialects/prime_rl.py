"""prime-rl's TOML files: recognized, and refused with what is the same here, for the rest has another form."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lachesis.common.errors import ConfigError
from lachesis.plugins.dialects.hydra import flat

# Of one file for all processes, and of the trainer's and the orchestrator's own files.
_SAME: Mapping[str, str] = {
    "max_steps": "run.steps", "model.name": "model.path", "seq_len": "source.max_sequence_length",
    "orchestrator.group_size": "sampling.num_generations",
    "orchestrator.rollouts_per_example": "sampling.num_generations",
    "group_size": "sampling.num_generations", "rollouts_per_example": "sampling.num_generations",
    "orchestrator.train.sampling.max_completion_tokens": "sampling.max_completion_length",
    "orchestrator.sampling.max_tokens": "sampling.max_completion_length",
    "orchestrator.train.sampling.temperature": "sampling.temperature",
    "trainer.optim.lr": "optimizer.learning_rate", "optim.lr": "optimizer.learning_rate",
    "trainer.optim.weight_decay": "optimizer.weight_decay", "optim.weight_decay": "optimizer.weight_decay",
    "trainer.optim.max_norm": "optimizer.max_grad_norm", "optim.max_norm": "optimizer.max_grad_norm",
    "trainer.model.lora.rank": "adapter.r", "trainer.model.lora.alpha": "adapter.alpha",
}  # fmt: skip
_OTHERWISE = {
    "orchestrator.batch_size": "counts completions: batch.prompts_per_step is it divided by the group",
    "orchestrator.train.source": "environments are source.env (verifiers)",
    "orchestrator.env": "environments are source.env (verifiers)",
    "env": "environments are source.env (verifiers)",
    "trainer.loss": "its loss is DPPO with a KL to the sampler: algorithm.loss_type dppo_tv, kl_reference sampler",
    "loss": "its loss is DPPO with a KL to the sampler: algorithm.loss_type dppo_tv, kl_reference sampler",
}


def refuse_toml(path: Path) -> ConfigError:
    """Return the error for a TOML file: what it says that is the same here, and what has another form.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", remedy="give a TOML file") from error
    names = dict(flat(data))
    same = [f"{ours}: {names[name]}" for name, ours in _SAME.items() if name in names]
    sections = ("orchestrator", "trainer", "inference", "optim", "env", "loss", "weight_broadcast")
    if not any(name.partition(".")[0] in sections for name in names):
        return ConfigError(f"{path} is TOML of no trainer that Lachesis knows", remedy="write YAML in Lachesis' keys")
    other = [f"{name}: {why}" for name, why in _OTHERWISE.items() if name in names or any(
        one.startswith(f"{name}.") for one in names)]  # fmt: skip
    return ConfigError(
        "\n".join([f"{path} is a configuration of prime-rl, whose loss and environments have another form", *other]),
        remedy=f"write a configuration of Lachesis' keys; the same here are {', '.join(same) or 'none of them'}",
    )
