"""Sample of the first rows of a local file: the length of its prompts, and the columns that rewards need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import add
from pathlib import Path
from typing import Any

from lachesis.common.hub import mentions
from lachesis.config.schema import LachesisConfig
from lachesis.plugins import load
from lachesis.rollouts.datasets.formats import IMAGE_COLUMNS, Problem, detect_format, to_problems
from lachesis.rollouts.datasets.rendering import missing_prompt
from lachesis.rollouts.datasets.rows import Row, column_names, parse_line, read_file
from lachesis.rollouts.rewards.rewarder import Rewarder, load_rewards

_ROWS = 1_000
# Assumed tokens of a chat template for each message, and letters of a token if the tokenizer is not here.
_TEMPLATE_TOKENS, _LETTERS = 12, 3
# Number of prompts whose images are counted.
_SHOWN = 64


@dataclass(frozen=True, slots=True)
class DataSample:
    """First rows of a file.

    Attributes:
        rows: number of rows that were read.
        columns: names of the columns that reward functions get.
        longest: tokens of the longest prompt, with an estimate for the chat template.
        images: tokens of the images in the prompt with the most.
    """

    rows: int
    columns: frozenset[str]
    longest: int
    images: int = 0


def sample_data(config: LachesisConfig) -> DataSample | None:
    """Read the first rows of ``data.path``; return None unless it is a local file whose rows are used unchanged.

    Raises:
        DataError: the file is malformed, or no row has a prompt.
    """
    data = config.data
    path = Path(data.path or "")
    if config.source.kind not in ("local", "agent") or data.more or data.transform or not path.is_file():
        return None
    rows = _first_rows(path)
    data_format = detect_format(
        column_names(rows), prompt_column=data.prompt_column, wanted=data.format, dataset=str(path)
    )
    made = config.run.setup is None or Path(config.model.path).exists()  # else run.setup has yet to make the model
    sees = made and config.model.vision != "text" and bool(mentions(config.model.path, "vision_config"))
    problems = [
        problem
        for row in rows
        for problem in to_problems(
            row,
            data_format=data_format,
            prompt_column=data.prompt_column,
            conversation=True,
            system_prompt=data.system_prompt,
            images=sees,
        )
    ]
    if problems and all(problem.prompt is None for problem in problems):
        raise missing_prompt(problems[0])
    columns = frozenset(name for problem in problems for name in problem.columns)
    images = _image_tokens(problems, config, path.parent) if sees else [0] * len(problems)
    longest = max(map(add, _tokens(problems, config), images), default=0)
    return DataSample(len(rows), columns, longest, max(images, default=0))


def check_reward_columns(config: LachesisConfig, sample: DataSample) -> None:
    """Import the reward functions, and check that the file has the columns that they need.

    Raises:
        RewardError: a function needs a column that the file does not have.
        ConfigError: a function cannot be imported.
    """
    if config.source.kind != "local" or config.source.tools or config.source.rollout_func:
        return  # rollouts add columns
    named = [spec if isinstance(spec, str) else str(spec.get("function")) for spec in config.rewards.functions]
    if any(Path(name).is_dir() for name in named):
        return  # a reward model can only be examined by loading it
    rewarder = Rewarder(load_rewards(config.rewards.functions))
    try:
        rewarder.check_columns(sample.columns)
    finally:
        rewarder.close()


def _first_rows(path: Path) -> Sequence[Row]:
    if path.suffix != ".jsonl":
        return read_file(path)[:_ROWS]
    with path.open("rb") as file:
        lines = [(number, line) for number, line in enumerate(islice(file, _ROWS), start=1) if line.strip()]
    return [parse_line(f"{path}, line {number}", line.removeprefix(b"\xef\xbb\xbf").strip()) for number, line in lines]


def _image_tokens(problems: Sequence[Problem], config: LachesisConfig, directory: Path) -> list[int]:
    """Return the tokens of each prompt's images by the rule of the model's processor; 0 beyond the first with any."""
    with_images = [number for number, problem in enumerate(problems) if _may_have_images(problem)][:_SHOWN]
    counts = [0] * len(problems)
    if with_images:
        from lachesis.train.model.loading import load_tokenizer  # imports torch

        reader = load("vision", "reader")(config.model, load_tokenizer(config.model))
        for number in with_images:
            _, images = reader.prepare(problems[number], directory=directory)
            counts[number] = sum(reader.placeholders(images)) if images else 0
    return counts


def _may_have_images(problem: Problem) -> bool:
    messages = problem.prompt if isinstance(problem.prompt, list) else []
    in_parts = any(isinstance(message, dict) and isinstance(message.get("content"), list) for message in messages)
    return in_parts or any(problem.columns.get(name) is not None for name in IMAGE_COLUMNS)


def _tokens(problems: Sequence[Problem], config: LachesisConfig) -> Iterator[int]:
    """Yield the tokens of each prompt."""
    file = Path(config.model.tokenizer or config.model.path) / "tokenizer.json"
    tokenizer = None
    if file.is_file():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
    for problem in problems:
        messages = problem.prompt if isinstance(problem.prompt, list) else [{"content": problem.prompt}]
        texts = [_text(message.get("content")) for message in messages if isinstance(message, dict)]
        counts = [len(text) // _LETTERS if tokenizer is None else len(tokenizer.encode(text).ids) for text in texts]
        yield sum(counts) + _TEMPLATE_TOKENS * len(texts)


def _text(content: Any) -> str:
    """Return the text of a message's content, which may be in parts."""
    if not isinstance(content, list):
        return str(content or "")
    return " ".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
