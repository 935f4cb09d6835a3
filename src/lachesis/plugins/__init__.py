"""Products beside the core, and the one table of what the core loads of them by name.

A row is imported when a configuration names it. Commands are rows of :data:`lachesis.cli.commands.COMMANDS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

TABLE: Mapping[str, Mapping[str, str]] = {
    "sources": {
        "atropos": "atropos.source.feed:build_feed",
        "agent": "environments.agents.build:build_agents",
        "mixture": "mixture.build:load_mixture",
        "mixture_findings": "mixture.rules:findings",
        "mixture_problems": "mixture.problems:problems",
        "rollout_func": "environments.rollout_func:build_players",
        "steps": "environments.steps.build:build_players",
        "verifiers": "environments.verifiers.build:build_players",
    },
    "pulses": {"atropos": "atropos.source.pulse:api_pulses"},
    "benchmarks": {"suite": "benchmarks.suite:build_suite"},
    "vision": {"inputs": "vision.inputs:image_inputs", "reader": "vision.reading:ImageReader"},
    "images": {"settle": "vision.settle:settle", "placeholders": "vision.settle:placeholders"},
    "teachers": {"url": "teachers.teacher:build_teach", "self": "teachers.own_prompts:build_teach"},
    "rewards": {
        "code": "sandbox.rewards.open_r1:code_reward",
        "binary_code": "sandbox.rewards.open_r1:binary_code_reward",
        "model": "reward_models.model:RewardModel",
    },
    "sinks": {
        "report": "report.page:ReportSink",
        "tensorboard": "sinks.tensorboard:TensorBoardSink",
        "wandb": "sinks.wandb:WandbSink",
        "trackio": "sinks.trackio:TrackioSink",
    },
}


def load(group: str, name: str) -> Any:
    """Import what ``name`` stands for in a group of :data:`TABLE`; raise KeyError if there is no such row."""
    module, _, attribute = TABLE[group][name].partition(":")
    return getattr(import_module(f"lachesis.plugins.{module}"), attribute)
