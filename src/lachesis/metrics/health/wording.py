"""Wording of findings for runs with environments, where remedies apply to these, not to the configuration."""

from __future__ import annotations

import re

# The longer ones first.
ELSEWHERE = {
    "sampling.top_p, sampling.top_k and sampling.min_p": "the environment's top_p, top_k and min_p",
    "sampling.top_p, sampling.top_k, sampling.min_p": "the environment's top_p, top_k and min_p",
    "the same sampling.temperature": "the same temperature",
    "sampling.temperature": "--env.temperature",
    "sampling.max_completion_length": "--env.max_token_length",
    "sampling.num_generations": "--env.group_size",
    "batch.prompts_per_step": "source.batch_size (--batch-size x --gradient-accumulation-steps)",
    "call the functions of rewards.functions on answers you know to be right": (
        "let the environment score answers you know to be right"
    ),
    "call it on an answer you know to be right, or take it out of rewards.functions": (
        "let the environment score an answer you know to be right"
    ),
    "take out model.chat_template, or correct the prompts in data.prompt_column": (
        "correct how the environment writes its prompts"
    ),
    "take it out of data.prompt_column": "take it out of the environment's prompts",
    "the functions of rewards.functions pay": "the environment's scores pay",
    "the functions of rewards.functions count": "the environment's scores count",
    "the functions of rewards.functions read": "the environment's scores read",
    "see the log for the first error, and set rewards.on_error to fail to stop at it": (
        "see the environment's log for the first error"
    ),
    "(model.chat_template, data.prompt_column, or data.conversations: true for texts)": "in the environment",
    "give generation more hardware": "give generation more hardware, or the environment --env.max_num_workers",
}
_KNOWN = re.compile("|".join(re.escape(words) for words in ELSEWHERE))


def for_environments(message: str) -> str:
    """Return a finding whose remedies apply where environments generate and score."""
    return _KNOWN.sub(lambda found: ELSEWHERE[found.group()], message)
