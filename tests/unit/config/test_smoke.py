from __future__ import annotations

from pathlib import Path

from lachesis.config.load import LoadedConfig
from lachesis.config.smoke import trial


def test_a_trial_is_two_steps_under_a_name_of_its_own(build):
    config = build(
        optimizer={"warmup_steps": 10},
        checkpoint={"every_steps": 5, "hub": {"repo": "me/model"}},
        data={"path": "a.jsonl", "eval_size": 40},
        logging={"wandb": {"project": "p"}},
    )
    tried = trial(LoadedConfig(config, Path())).config
    assert (tried.run.steps, tried.run.epochs, tried.run.name) == (2, None, f"{config.run.name}-smoke")
    assert (tried.checkpoint.every_steps, tried.evaluation.max_problems) == (0, 4)
    assert tried.logging.wandb is None and tried.checkpoint.hub is None
    assert (tried.algorithm, tried.batch, tried.sampling) == (config.algorithm, config.batch, config.sampling)
