"""GSM8K: prompts that ask for tags, and rewards for the right number and for the tags."""

from __future__ import annotations

from math_verify import parse, verify

TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
INSTRUCTIONS = (
    "Work the problem out between <reasoning> and </reasoning>. "
    "Then write the final number, and nothing else, between <answer> and </answer>."
)


def prompt_transform(cfg, *args, **kwargs):
    """A row of GSM8K as a conversation; rewards get the final number as ``answer``."""

    def transform(row, tokenizer=None):
        return {
            "prompt": [
                {"role": "system", "content": INSTRUCTIONS},
                {"role": "user", "content": row["question"]},
            ],
            "answer": row["answer"].rpartition("####")[2].strip().replace(",", ""),
        }

    return transform, {"remove_columns": ["question"]}


def accuracy_reward(completions, answer, **columns) -> list[float]:
    """1 where what stands in the last answer tags is the right number, in whatever form: 0.5, 1/2, 50\\%.

    math-verify limits its own time by an alarm, so this runs in processes of its own (`reward_num_workers`).
    """
    return [float(is_right(text_of(one), right)) for one, right in zip(completions, answer, strict=True)]


def format_reward(completions, **columns) -> list[float]:
    """A quarter for each of the four tags that is there exactly once."""
    return [sum(text_of(one).count(tag) == 1 for tag in TAGS) / len(TAGS) for one in completions]


def is_right(text: str, right: str) -> bool:
    """Whether the answer in a completion equals ``right``, a number as text."""
    _, opened, rest = text.rpartition("<answer>")
    found, closed, _ = rest.partition("</answer>")
    if not opened or not closed or not found.strip():
        return False
    given = found.strip().strip("$")
    return verify(parse(f"${right}$"), parse(f"${given}$"))


def text_of(completion) -> str:
    """The words of a completion, which comes as a conversation."""
    return completion[0]["content"]
