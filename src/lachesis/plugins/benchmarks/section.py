"""An entry of `evaluation.benchmarks`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Literal

from pydantic import Field

from lachesis.config.section import PositiveInt, Section

BenchmarkName = Literal[
    "gsm8k", "math500", "aime24", "aime25", "amc23", "ifeval", "humaneval", "mbpp", "livecodebench"
]  # fmt: skip


class BenchmarkConfig(Section):
    """A named benchmark with changed settings."""

    name: BenchmarkName = Field(description="Name of the benchmark.")
    path: str | None = Field(default=None, description="File or dataset with its problems, in the same columns.")
    split: str | None = Field(default=None, description="Like `data.split`; the benchmark's own if unset.")
    samples: PositiveInt | None = Field(default=None, description="Like `evaluation.samples_per_problem`.")
    max_problems: PositiveInt | None = Field(default=None, description="Use only the first N problems.")
    max_tokens: PositiveInt | None = Field(
        default=None, description="Most tokens of a completion; `sampling.max_completion_length` if unset."
    )


def needed_package(names: Sequence[str]) -> str | None:
    """Return a sentence about the package that the benchmarks need and that is not installed; None if there is none."""
    if "ifeval" not in names or find_spec("if_verifiable") is not None:
        return None
    return "ifeval needs if-verifiable to check instructions, but it is not installed"
