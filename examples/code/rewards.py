"""The example's reward: all tests pass, or they do not."""

from lachesis.rollouts.rewards.grpo_code import code_execution_reward_func


def passes(completions, test_cases, **columns):
    """1 where the function passes all its tests, which run in the sandbox; a lucky share of them is worth nothing."""
    shares = code_execution_reward_func(completions, test_cases=test_cases, **columns)
    return [float(share == 1) if isinstance(share, float) else share for share in shares]
