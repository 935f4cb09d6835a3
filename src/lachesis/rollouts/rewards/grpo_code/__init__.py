"""Ready-made transforms and rewards for code: used under the name ``grpo_code`` where no such module is."""

from lachesis.rollouts.rewards.grpo_code.rewards import (
    answer_execution_reward_func,
    code_execution_reward_func,
    soft_format_reward_func,
)
from lachesis.rollouts.rewards.grpo_code.transforms import (
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
