"""The configuration as transforms see it: Axolotl's names, as attributes and as keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lachesis.config.schema import LachesisConfig


class ConfigView(Mapping[str, Any]):
    """A read-only mapping whose keys are attributes too; what there is not is ``None``, as with Axolotl's."""

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self._values = dict(values or {})

    def __getitem__(self, key: str) -> Any:
        value = self._values.get(key)
        return ConfigView(value) if isinstance(value, Mapping) else value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked for by copy and pickle before there are values
            raise AttributeError(name)
        return self[name]

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or ``default`` where there is none."""
        return self[key] if key in self._values else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"ConfigView({self._values!r})"


def axolotl_names(config: LachesisConfig) -> dict[str, Any]:
    """What transforms usually ask a configuration for, under Axolotl's names. Plain values only."""
    sampling, data = config.sampling, config.data
    return {
        "base_model": config.model.path,
        "rl": "grpo",
        "seed": config.run.seed,
        "max_steps": config.run.steps,
        "num_epochs": config.run.epochs,
        "sequence_len": data.max_prompt_length,
        "chat_template": config.model.chat_template,
        "micro_batch_size": config.batch.micro_batch_size,
        "learning_rate": config.optimizer.learning_rate,
        "output_dir": config.run.dir,
        "dataset_processes": data.processes,
        "dataset_prepared_path": data.prepared_path,
        "datasets": [
            {"path": one.path, "name": one.name, "split": one.split, "type": one.transform}
            for one in (data, *data.more)
        ],
        "trl": {
            "num_generations": sampling.num_generations,
            "max_completion_length": sampling.max_completion_length,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "chat_template_kwargs": dict(data.chat_template_kwargs),
            "reward_funcs": list(config.rewards.functions),
            "reward_weights": config.rewards.weights,
        },
    }
