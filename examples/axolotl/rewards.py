"""Rewards and prompts for GSM8K."""

from __future__ import annotations

import re

INSTRUCTIONS = "Think inside <think></think>, then give the final number alone inside <answer></answer>."
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def accuracy_reward(completions, answer, **kwargs) -> list[float]:
    """1 where the last number is the right one."""
    return [float(_last_number(_text(c)) == _last_number(right)) for c, right in zip(completions, answer, strict=True)]


def format_reward(completions, **kwargs) -> list[float]:
    """1 where a thought is followed by an answer, both in their tags."""
    shape = re.compile(r"<think>.+?</think>\s*<answer>.+?</answer>\s*$", re.DOTALL)
    return [float(bool(shape.search(_text(completion)))) for completion in completions]


def prompt_transform(cfg, *args, **kwargs):
    """Rows of openai/gsm8k to conversations, with the number alone as the answer."""

    def row_to_prompt(example, tokenizer=None):
        return {
            "prompt": [
                {"role": "system", "content": INSTRUCTIONS},
                {"role": "user", "content": example["question"]},
            ],
            "answer": example["answer"].rpartition("####")[2].strip(),
        }

    return row_to_prompt, {"remove_columns": ["question"]}


def _text(completion) -> str:
    return completion[0]["content"]


def _last_number(text: str) -> float | None:
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None
