"""Built-in rewards, which a configuration names without a module; each does what TRL or open-r1 documents.

TRL's names end in ``_reward`` or name its factories; open-r1's recipes use short ones. A reward with arguments has a
factory, called with its defaults if the file gives none. Completions are texts or lists of one message.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lachesis.plugins import load
from lachesis.rollouts.rewards.functions import Reward
from lachesis.rollouts.tagged_text import after_in_order, has_line_end

_STEP = re.compile(r"Step \d+:|^\d+\.|\n-|\n\*|First,|Second,|Next,|Finally,")
_TAGS = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")


def accuracy_reward(completions: Sequence[Any], solution: Sequence[str], **_: Any) -> list[float | None]:
    """Return 1 if math_verify finds the answer to be the solution, else 0, None if it cannot read the solution."""
    from lachesis.rollouts.rewards.mathematics import same_answers

    return same_answers(map(completion_text, completions), solution)


def reasoning_accuracy_reward(
    completions: Sequence[Any], solution: Sequence[str], reasoning_delimiters: Sequence[str] = ("</think>",), **_: Any
) -> list[float | None]:
    """Return :func:`accuracy_reward` of the text after the last delimiter; 0 if none ends the reasoning."""
    texts = list(map(completion_text, completions))
    ends = [next((one for one in reasoning_delimiters if one in text), None) for text in texts]
    answers = [text.rpartition(end)[2] if end else "" for text, end in zip(texts, ends, strict=True)]
    same = accuracy_reward(answers, solution)
    return [0.0 if end is None else right for right, end in zip(same, ends, strict=True)]


def think_format_reward(completions: Sequence[Any], prompt_texts: Sequence[str] | None = None, **_: Any) -> list[float]:
    """Return 1 for reasoning between one ``<think>``, at the beginning, and ``</think>``.

    If the rendered prompt ends with ``<think>``, as in templates of R1 distills and Qwen3.5, the completion starts
    after it.
    """
    texts = _with_opened_tag(completions, prompt_texts)
    return [float(text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text) for text in texts]


def format_reward(completions: Sequence[Any], prompt_texts: Sequence[str] | None = None, **_: Any) -> list[float]:
    """Return 1 for ``<think>`` and ``<answer>`` blocks, each on separate lines, and nothing else.

    A ``<think>`` that ends the rendered prompt counts, as for :func:`think_format_reward`.
    """
    return [float(_has_form(text)) for text in _with_opened_tag(completions, prompt_texts)]


def tag_count_reward(completions: Sequence[Any], prompt_texts: Sequence[str] | None = None, **_: Any) -> list[float]:
    """Return a quarter for each of the four tags of :func:`format_reward` that occurs once."""
    texts = _with_opened_tag(completions, prompt_texts)
    return [sum(text.count(tag) == 1 for tag in _TAGS) / len(_TAGS) for text in texts]


def reasoning_steps_reward(completions: Sequence[Any], **_: Any) -> list[float]:
    """Return a third for each mark of a step (``Step 1:``, a list's item, ``First,``), 1 from three on."""
    return [min(1.0, len(_STEP.findall(completion_text(one))) / 3) for one in completions]


def length_reward(completions: Sequence[Any], solution: Sequence[str], **_: Any) -> list[float | None]:
    """Return 0.5 for the shortest of a group down to -0.5 for the longest; wrong answers get at most 0.

    Kimi k1.5 (2025), section 2.3.3. Lengths are in characters, over all completions of a call.
    """
    right = accuracy_reward(completions, solution)
    lengths = [len(completion_text(one)) for one in completions]
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest:
        return [0.0] * len(lengths)
    shares = [0.5 - (length - shortest) / (longest - shortest) for length in lengths]
    return [share if good is None or good else min(0.0, share) for share, good in zip(shares, right, strict=True)]


def get_soft_overlong_punishment(max_completion_len: int = 1280, soft_punish_cache: int = 256) -> Reward:
    """Return a reward: 0 up to a length, then falling to -1 at ``max_completion_len`` tokens: DAPO (2025), eq. 13."""
    begin = max_completion_len - soft_punish_cache

    def soft_overlong_punishment_reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float | None]:
        lengths = [len(ids) for ids in completion_ids]
        return [
            0.0 if length <= begin else -1.0 if length > max_completion_len else (begin - length) / soft_punish_cache
            for length in lengths
        ]

    return soft_overlong_punishment_reward


def get_cosine_scaled_reward(
    max_len: int = 1000,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
    in_tokens: bool = True,
) -> Reward:
    """Return a reward that follows half a cosine over the length: right answers should be short, wrong ones long.

    Yeo et al., "Demystifying Long Chain-of-Thought Reasoning in LLMs" (2025), appendix C.1. TRL counts tokens,
    open-r1 characters.
    """

    def cosine_scaled_reward(
        completions: Sequence[Any], solution: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: Any
    ) -> list[float | None]:
        rewards: list[float | None] = []
        for index, right in enumerate(accuracy_reward(completions, solution)):
            if right is None:
                rewards.append(None)
                continue
            length = len(completion_ids[index]) if in_tokens else len(completion_text(completions[index]))
            low, high = (min_value_correct, max_value_correct) if right else (max_value_wrong, min_value_wrong)
            course = 1.0 + math.cos(math.pi * min(length / max_len, 1.0))
            rewards.append(low + 0.5 * (high - low) * course)
        return rewards

    return cosine_scaled_reward


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0, in_tokens: bool = True) -> Reward:
    """Return a reward of ``max_penalty`` times the share of repeated n-grams: the same paper, appendix C.2.

    TRL takes n-grams of tokens, open-r1 of lower-case words.
    """

    def repetition_penalty_reward(
        completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], **_: Any
    ) -> list[float | None]:
        sequences = completion_ids if in_tokens else [completion_text(one).lower().split() for one in completions]
        return [max_penalty * _repeated(sequence, ngram_size) for sequence in sequences]

    return repetition_penalty_reward


def get_code_format_reward(language: str = "python") -> Reward:
    """Return a reward: :func:`format_reward` with a block of code in that language in the answer."""

    def code_format_reward(
        completions: Sequence[Any], prompt_texts: Sequence[str] | None = None, **_: Any
    ) -> list[float | None]:
        texts = _with_opened_tag(completions, prompt_texts)
        return [float(_has_form(text, f"```{language}", "```")) for text in texts]

    return code_format_reward


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "accuracy_reward": accuracy_reward,
    "reasoning_accuracy_reward": reasoning_accuracy_reward,
    "think_format_reward": think_format_reward,
    "accuracy": accuracy_reward,
    "format": format_reward,
    "tag_count": tag_count_reward,
    "reasoning_steps": reasoning_steps_reward,
    "length": length_reward,
    "code": lambda *given, **columns: load("rewards", "code")(*given, **columns),
    "binary_code": lambda *given, **columns: load("rewards", "binary_code")(*given, **columns),
}
FACTORIES: Mapping[str, Callable[..., Reward]] = {
    "get_soft_overlong_punishment": get_soft_overlong_punishment,
    "get_cosine_scaled_reward": get_cosine_scaled_reward,
    "get_repetition_penalty_reward": get_repetition_penalty_reward,
    "soft_overlong_punishment": get_soft_overlong_punishment,
    "cosine": get_cosine_scaled_reward,
    "repetition_penalty": get_repetition_penalty_reward,
    "code_format": get_code_format_reward,
}


def _with_opened_tag(completions: Sequence[Any], prompt_texts: Sequence[str] | None) -> list[str]:
    """Return the completions' texts, each after the ``<think>`` that its rendered prompt ends with, if it does."""
    texts = []
    for completion, prompt in zip(completions, prompt_texts or [""] * len(completions), strict=True):
        opened = f"<think>{prompt[len(prompt.rstrip()) :]}" if prompt.rstrip().endswith("<think>") else ""
        texts.append(opened + completion_text(completion))
    return texts


def _has_form(text: str, *inside: str) -> bool:
    """Return True if a text begins with thoughts and an answer in their tags, the marks ``inside`` in the latter."""
    if not text.startswith(_TAGS[0]):
        return False
    at = after_in_order(text, ("\n</think>\n<answer>\n", *inside), at=len(_TAGS[0]))
    return at >= 0 and has_line_end(text, "\n</answer>", at)


def _repeated(sequence: Sequence[Any], size: int) -> float:
    """Return the share of a sequence's n-grams that are repetitions; 0 if it is shorter than one."""
    grams = Counter(tuple(sequence[start : start + size]) for start in range(len(sequence) - size + 1))
    return 1.0 - len(grams) / grams.total() if grams else 0.0


def completion_text(completion: Any) -> str:
    return completion if isinstance(completion, str) else str(completion[0]["content"])
