"""The table of benchmarks, and their problems."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedTokenizerBase

from lachesis.common.errors import ConfigError, DataError
from lachesis.common.imports import optional_package
from lachesis.common.types import Prompt
from lachesis.plugins.benchmarks.section import BenchmarkConfig
from lachesis.rollouts.datasets.problems import Dataset, load_problems
from lachesis.rollouts.rewards.built_in import completion_text


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A row of ``table.toml``.

    Attributes:
        path, name, split: of the dataset; the path may be a local file, for which name and split have no effect.
        prompt: format of the user's message, over the row's columns.
        reward: name of the reward function; 1 is a success.
        solution: column with the right answer; only the text after ``after`` counts.
    """

    path: str
    split: str
    prompt: str
    reward: str
    name: str | None = None
    solution: str | None = None
    after: str = ""

    def row(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns that are added to a row: its prompt and its solution, as LaTeX.

        Raises:
            DataError: the row lacks a column.
        """
        try:
            made = {"prompt": self.prompt.format_map(columns)}
            answer = "" if self.solution is None else str(columns[self.solution])
        except KeyError as error:
            raise DataError(
                f"there is no column {error}, only {', '.join(columns)}", remedy=f"name columns as in {self.path}"
            ) from error
        if self.solution is None:
            return made
        return made | {"solution": f"${(answer.rpartition(self.after)[2] if self.after else answer).strip()}$"}


@cache
def benchmarks() -> Mapping[str, Benchmark]:
    """Return the table, by name."""
    text = Path(__file__).with_name("table.toml").read_text("utf-8")
    return {name: Benchmark(**row) for name, row in tomllib.loads(text).items()}


def dataset_of(asked: BenchmarkConfig) -> Dataset:
    """Return the dataset of a benchmark, from the place that the configuration names, if any."""
    known = benchmarks()[asked.name]
    place = Dataset(known.path, known.name, known.split) if asked.path is None else Dataset(asked.path)
    split = place.split if asked.split is None else asked.split
    return Dataset(place.path, place.name, split, transform=f"{__name__}.to_row")


def to_row(cfg: Mapping[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the transform of rows of the benchmark that ``cfg`` names."""
    return benchmarks()[str(cfg["benchmark"])].row


def problems_of(asked: BenchmarkConfig, *, tokenizer: PreTrainedTokenizerBase, room: int) -> list[Prompt]:
    """Load a benchmark's problems, as user messages if the tokenizer has a chat template.

    Args:
        room: most tokens of a prompt.

    Raises:
        DataError: the dataset is missing or lacks a column, or a prompt is too long.
        ConfigError: completions leave no room for a prompt.
    """
    if room < 1:
        raise ConfigError(
            f"the completions of benchmark {asked.name} leave no room for a prompt", remedy="lower its max_tokens"
        )
    found = load_problems(
        dataset_of(asked),
        tokenizer=tokenizer,
        conversations=bool(tokenizer.chat_template),
        max_prompt_length=room,
        transform_config={"benchmark": asked.name},
    )
    return found[: asked.max_problems]


def follows_instructions(
    completions: Sequence[Any], instruction_id_list: Sequence[Any], kwargs: Sequence[Any], **columns: Any
) -> list[float]:
    """Return 1 if an answer strictly follows all instructions of an IFEval prompt (arXiv 2311.07911).

    Raises:
        DependencyError: ``if-verifiable``, which checks them, is not installed.
    """
    why = "ifeval needs if-verifiable to check instructions, but it is not installed"
    checker = optional_package("if_verifiable", why, remedy="pip install if-verifiable")
    prompts = columns.get("prompt", [""] * len(completions))
    rewards: list[float] = []
    for text, names, options, prompt in zip(completions, instruction_id_list, kwargs, prompts, strict=True):
        sample = SimpleNamespace(prompt=prompt, instruction_id_list=names, kwargs=options)
        _, scores = checker.evaluate_output_for_sample("ifeval", sample, completion_text(text))
        rewards.append(float(scores.binary_strict))
    return rewards
