"""Whether reward functions that others have published score as they do there: each runs unmodified, on a known answer.

Run ``python -m benchmarks.public_rewards CHECKOUTS``, a folder with a checkout ``OWNER+NAME`` of each repository below.
A function gets what its trainer gives it, through the same code as in a run: texts or messages, columns, arguments.
What is printed is the second table of benchmarks/PUBLIC_FILES.md. The files are not part of this repository.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lachesis.common.errors import LachesisError
from lachesis.common.types import Group, Prompt, Sample, VersionSpan
from lachesis.rollouts.rewards.rewarder import Rewarder, load_reward

THINK = "<think>\nAdd them.\n</think>\n<answer>\n4\n</answer>"
XML = "<reasoning>\nAdd.\n</reasoning>\n<answer>\n4\n</answer>\n"
COUNTDOWN = "I add them.</think>\n<answer>1 + 2 + 4</answer>"
BOXED = "So it is $\\boxed{4}$."
STEPS = "Step 1: read. Step 2: add. Step 3: say."


@dataclass(frozen=True, slots=True)
class Case:
    """A function of a file, what it is given, and what it returns there.

    Attributes:
        chat: whether the prompt is a conversation; else completions are texts, as in TRL.
        texts: two completions of one prompt.
        kwargs: of a factory, or beside the completions.
    """

    repo: str
    path: str
    function: str
    texts: tuple[str, str]
    expected: tuple[float | None, float | None]
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    chat: bool = True


_COUNTDOWN: Mapping[str, Any] = {"nums": [1, 2, 4], "target": 7}
_OPEN_R1 = "src/open_r1/rewards.py"
_OLDER = ("jianzhnie/Open-R1", "openr1/utils/reward_funcs.py")
_COOKBOOK = ("belatijagad/cendekia-r1", "reward.py")
CASES: Sequence[Case] = (
    Case(*_COOKBOOK, "correctness_reward_func", (XML, "4"), (2.0, 2.0), {"answer": "4"}),
    Case(*_COOKBOOK, "strict_format_reward_func", (XML, "4"), (0.5, 0.0)),
    Case(*_COOKBOOK, "soft_format_reward_func", (XML.replace("\n", " "), "4"), (0.25, 0.0)),
    Case(*_COOKBOOK, "xmlcount_reward_func", (XML, "4"), (0.5, 0.0)),
    Case("Infernaught/HPML_Final_Project", "tasks/countdown/reward_functions.py", "equation_reward_func",
         (COUNTDOWN, COUNTDOWN.replace("+ 4", "- 4")), (1.0, 0.0), _COUNTDOWN, chat=False),
    Case("Infernaught/HPML_Final_Project", "tasks/countdown/reward_functions.py", "format_reward_func",
         (COUNTDOWN, "7"), (1.0, 0.0), _COUNTDOWN, chat=False),
    Case("Infernaught/HPML_Final_Project", "tasks/aime/reward_functions.py", "returns_int_reward_func",
         ("x</think>\n<answer>12</answer>", "twelve"), (1.0, 0.0), {"answer": "12"}, chat=False),
    Case("jianzhnie/Open-R1", "examples/grpo_demo.py", "equation_reward_func",
         (COUNTDOWN, "7"), (1.0, 0.0), _COUNTDOWN, chat=False),
    Case("kencoken/qwen-grpo", "rewards.py", "format_reward", (THINK, BOXED), (0.2, 0.0)),
    Case("nfsrules/qwen2.5VL-R1", "src/training/rewards.py", "check_answer",
         ("<answer>4</answer>", "<answer>5</answer>"), (3.0, -1.0), {"answer": "<answer>4</answer>"}),
    Case(*_OLDER, "accuracy_reward", (BOXED, "It is $\\boxed{5}$."), (1.0, 0.0), {"solution": "$4$"}),
    Case(*_OLDER, "format_reward", ("<think>a</think><answer>4</answer>", "4"), (1.0, 0.0)),
    Case(*_OLDER, "reasoning_steps_reward", (STEPS, "4"), (1.0, 0.0)),
    Case(*_OLDER, "get_cosine_scaled_reward", (BOXED, "no"),
         (0.5 + 0.25 * (1 + math.cos(math.pi * len(BOXED) / 100)), -0.5 - 0.25 * (1 + math.cos(math.pi * 2 / 100))),
         {"solution": "$4$"},
         {"min_value_wrong": -1.0, "max_value_wrong": -0.5, "min_value_correct": 0.5, "max_value_correct": 1.0,
          "max_len": 100}),
    Case(*_OLDER, "get_repetition_penalty_reward", ("a b a b", "a b c d"), (-1 / 3, 0.0), {},
         {"ngram_size": 2, "max_penalty": -1.0}),
    Case("huggingface/open-r1", _OPEN_R1, "accuracy_reward", (BOXED, "It is $\\boxed{5}$."), (1.0, 0.0),
         {"solution": "$4$"}),
    Case("huggingface/open-r1", _OPEN_R1, "tag_count_reward", (THINK, "<think>\n"), (1.0, 0.25)),
    Case("dongyoung-go/rlpvr-open-r1", _OPEN_R1, "format_reward", (THINK, "4"), (1.0, 0.0)),
    Case("axolotl-ai-cloud/grpo_code", "grpo_code/rewards.py", "code_execution_reward_func",
         ("```python\nprint(1)\n```", "```python\nraise ValueError\n```"), (1.0, 0.0)),
    # A module beside it, imported whole.
    Case("thetushargoyal/llama-1b-grpo", "reward_funcs.py", "correctness_reward_func", (THINK, "5"), (2.0, 0.0),
         {"answer": "4"}),
    Case("thetushargoyal/llama-1b-grpo", "reward_funcs.py", "xmlcount_reward_func", (THINK, "5"), (0.454, 0.0)),
    # Tensors as rewards, and arguments of its own beside TRL's.
    Case("Coldmooon/LLM-GPRO-Reasoning", "reward.py", "correctness_reward", (XML, "no idea"), (1.5, 0.0),
         {"answer": "4"}),
    Case("Coldmooon/LLM-GPRO-Reasoning", "reward.py", "format_reward", (XML, "4"), (0.8, 0.0)),
    Case("BrenchCC/Qwen3-0.6B-GRPO-GSM8K-Demo", "reward.py", "trl_reward_fn", ("It is #### 42", "It is #### 41"),
         (1.0, 0.3), {"solution": "42"}, chat=False),
    Case("ielts0826/GRPO_PROJECT_FOR_AUTODL", "reward_funcs.py", "correctness_reward_func", (XML, "5"), (2.0, 0.0),
         {"answer": "4"}, chat=False),
    Case("ielts0826/GRPO_PROJECT_FOR_AUTODL", "reward_funcs.py", "strict_format_reward_func", (XML, "5"), (0.5, 0.0)),
)  # fmt: skip


def scored(case: Case, folder: Path) -> tuple[float | None, ...]:
    """The rewards of the two completions, by the path that a run takes."""
    file = folder / case.repo.replace("/", "+") / case.path
    named: dict[str, Any] = {"function": f"{file}:{case.function}", "kwargs": dict(case.kwargs)}
    messages = ({"role": "user", "content": "<answer>4</answer>"},) if case.chat else None
    prompt = Prompt("p", token_ids=(1,), text="1 + 2 + 4?", messages=messages, columns=case.columns)
    samples = tuple(Sample((1,), (2,), (0.0,), "stop", VersionSpan(0, 0), text=text) for text in case.texts)
    rewarder = Rewarder([load_reward(named)], text_completions="text")
    try:
        # Some print what they are given, and some write logs.
        with contextlib.redirect_stdout(io.StringIO()), TemporaryDirectory() as away, contextlib.chdir(away):
            groups = rewarder.score([Group(prompt, samples)]).groups
    finally:
        rewarder.close()
    return tuple(sample.rewards[0] for sample in groups[0].samples)


def result(case: Case, folder: Path) -> str:
    try:
        found = scored(case, folder)
    except LachesisError as error:
        return " ".join(error.message.replace(str(folder), "").split())[:160]
    pairs = zip(found, case.expected, strict=True)
    same = all(
        a == b or (a is not None and b is not None and math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)) for a, b in pairs
    )
    return "as there" if same else f"{found} and not {case.expected}"


def main(folder: Path) -> None:
    logging.disable(logging.WARNING)
    results = [result(case, folder) for case in CASES]
    for case, said in zip(CASES, results, strict=True):
        link = f"[{case.repo}](https://github.com/{case.repo})"
        sys.stdout.write(f"| {link} `{case.path}` | `{case.function}` | {said} |\n")
    files = {(case.repo, case.path) for case in CASES}
    good = sum(said == "as there" for said in results)
    sys.stdout.write(f"\n{good} of {len(results)} functions of {len(files)} files\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
