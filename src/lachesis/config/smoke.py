"""A short trial of any configuration: it shows that the run works, not what it learns."""

from __future__ import annotations

from dataclasses import replace

from lachesis.config.load import LoadedConfig
from lachesis.config.single_sources import single_configs

STEPS = 2
PROBLEMS = 4
NAME = "-smoke"


def trial(loaded: LoadedConfig) -> LoadedConfig:
    """Return the configuration under another name, cut to two steps and few held-out problems, without uploads."""
    config = loaded.config
    run = config.run.model_copy(update={"steps": STEPS, "epochs": None, "name": f"{config.run.name}{NAME}"})
    evaluates = any(one.data.evaluates for one in single_configs(config).values())
    most = min(PROBLEMS, config.evaluation.max_problems or PROBLEMS) if evaluates else None
    changes = {
        "run": run,
        "evaluation": config.evaluation.model_copy(
            update={"every_steps": 0, "every_epochs": None, "max_problems": most}
        ),
        "checkpoint": config.checkpoint.model_copy(update={"every_steps": 0, "every_epochs": None, "hub": None}),
        "logging": config.logging.model_copy(update={"wandb": None}),
    }
    return replace(loaded, config=config.model_copy(update=changes))
