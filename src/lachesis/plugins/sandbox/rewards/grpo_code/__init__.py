"""Ready-made transforms and rewards for code, importable as ``grpo_code`` unless such a module is installed.

Each is loaded on first use: a process that calls the rewards does not need datasets.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lachesis.plugins.sandbox.rewards.grpo_code.rewards import (
        answer_execution_reward_func,
        code_execution_reward_func,
        soft_format_reward_func,
    )
    from lachesis.plugins.sandbox.rewards.grpo_code.transforms import (
        axolotl_acecode_transform,
        instruction_response_transform,
        instruction_response_with_tests_transform,
    )

__all__ = [
    "answer_execution_reward_func",
    "axolotl_acecode_transform",
    "code_execution_reward_func",
    "instruction_response_transform",
    "instruction_response_with_tests_transform",
    "soft_format_reward_func",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "rewards" if name.endswith("_reward_func") else "transforms"
    return getattr(import_module(f"{__name__}.{module}"), name)
