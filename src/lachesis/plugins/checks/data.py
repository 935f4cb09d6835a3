"""Check of a dataset that reports its problems in sentences, before a run meets them."""

from __future__ import annotations

import ast
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lachesis.common.errors import DataError
from lachesis.common.types import Finding, Level
from lachesis.rollouts.datasets.formats import PAIRS, Problem, detect_format, to_problems
from lachesis.rollouts.datasets.problems import Dataset, read_rows
from lachesis.rollouts.datasets.rendering import Rendered, missing_prompt, render, tokenize
from lachesis.rollouts.datasets.rows import (
    Row,
    aligned,
    column_names,
    is_blank,
    is_hub_name,
    lines_of,
    parse_line,
    select,
)
from lachesis.rollouts.datasets.transforms import TransformSpec, load_transform

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Findings of one rule that are listed one by one; the others are counted.
_MOST_OF_A_RULE = 5
_CODE_BEGINS = ("def ", "class ", "import ", "from ", "async def ", "@", "```python", "```py")
_JSONL_SUFFIXES = ("", ".jsonl", ".ndjson")


def check_data(
    dataset: Dataset,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_prompt_length: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    base_dir: Path | None = None,
) -> list[Finding]:
    """Read a dataset as training would, and continue where that would stop.

    Looks for lines that are not JSON, transforms that fail, questions and answers that are missing or empty,
    code that does not parse, invalid tests, repeated questions, and prompts that are too long; also says if there are
    enough problems.

    Args:
        dataset: path, format and columns.
        tokenizer: measures lengths in tokens, if given.
        max_prompt_length: longest prompt, in tokens.

    Raises:
        ConfigError: the transform cannot be loaded, or the format is unknown.
    """
    found = _Findings()
    rows = _rows(dataset, found)
    if dataset.transform is not None:
        rows = _transformed(rows, dataset, tokenizer, base_dir or Path(), found)
    problems = _problems(rows, dataset, tokenizer is None or bool(tokenizer.chat_template), found)
    _check_duplicates(problems, found)
    if tokenizer is not None:
        _check_lengths(problems, tokenizer, max_prompt_length, chat_template_kwargs or {}, found)
    found.add(*_advice(len(problems)))
    return found.all()


class _Findings:
    """Collection of findings: for each rule the first few, and a count of the others."""

    def __init__(self) -> None:
        self._findings: list[Finding] = []
        self._counts: Counter[str] = Counter()

    def add(self, level: Level, rule: str, message: str) -> None:
        self._counts[rule] += 1
        if self._counts[rule] <= _MOST_OF_A_RULE:
            self._findings.append(Finding(level, rule, message))

    def all(self) -> list[Finding]:
        """Return problems first, then warnings, then notes."""
        levels: dict[str, Level] = {finding.rule: finding.level for finding in self._findings}
        more = [
            Finding(levels[rule], rule, f"{count - _MOST_OF_A_RULE} more of this kind ({rule})")
            for rule, count in self._counts.items()
            if count > _MOST_OF_A_RULE
        ]
        return sorted(self._findings + more, key=lambda one: ("problem", "warning", "note").index(one.level))


def _rows(dataset: Dataset, found: _Findings) -> list[Row]:
    path = Path(dataset.path).expanduser()
    try:
        if path.is_dir() or is_hub_name(dataset.path) or path.suffix.lower() not in _JSONL_SUFFIXES:
            return read_rows(dataset)[0]
        rows = []
        for number, line in lines_of(path):
            try:
                rows.append(parse_line(f"{path}, line {number}", line))
            except DataError as error:
                found.add("problem", "unreadable", str(error))
        return select(aligned(rows), dataset.split, path) if rows else []
    except DataError as error:
        found.add("problem", "unreadable", str(error))
        return []


def _transformed(
    rows: Sequence[Row], dataset: Dataset, tokenizer: PreTrainedTokenizerBase | None, base_dir: Path, found: _Findings
) -> list[Row]:
    transform = load_transform(TransformSpec(dataset.transform or "", base_dir.resolve(), {}))
    made = []
    for row in rows:
        try:
            made.append(transform.apply(row, tokenizer))  # type: ignore[arg-type]
        except DataError as error:
            found.add("problem", "transform", str(error))
    return aligned(made)


def _problems(rows: Sequence[Row], dataset: Dataset, conversation: bool, found: _Findings) -> list[Problem]:
    """Return the problems that the rows give; note faults of other rows, and of answers."""
    if not rows:
        return []
    try:
        data_format = detect_format(
            column_names(rows), prompt_column=dataset.prompt_column, wanted=dataset.format, dataset=dataset.path
        )
    except DataError as error:
        found.add("problem", "format", str(error))
        return []
    found.add("note", "format", f"{len(rows)} rows of the format {data_format}: {', '.join(column_names(rows))}")
    problems = []
    for row in rows:
        try:
            made = to_problems(
                row,
                data_format=data_format,
                prompt_column=dataset.prompt_column,
                conversation=conversation,
                system_prompt=None,
            )
        except DataError as error:
            found.add("problem", "missing", str(error))
            continue
        if blank := [problem for problem in made if is_blank(problem.prompt)]:
            found.add("problem", "missing", str(missing_prompt(blank[0])))
        problems += [problem for problem in made if not is_blank(problem.prompt)]
        _check_answer(row, PAIRS[data_format][1] if data_format in PAIRS else "answer", found)
    return problems


def _check_answer(row: Row, column: str, found: _Findings) -> None:
    from lachesis.plugins.sandbox.rewards.grpo_code.rewards import extract_code
    from lachesis.plugins.sandbox.rewards.grpo_code.transforms import read_tests

    answer, tests = row.columns.get(column), row.columns.get("test_cases")
    if is_blank(answer) and column in row.columns:
        found.add("warning", "no answer", f"{row.place}: column {column!r} is empty: rewards have nothing to compare")
    if isinstance(answer, str) and (not is_blank(tests) or answer.lstrip().startswith(_CODE_BEGINS)):
        _check_code(row.place, column, extract_code(answer), found)
    try:
        statements = read_tests(tests)
    except ValueError as error:
        found.add("problem", "tests", f"{row.place}: {error}")
        return
    for test in statements:
        _check_code(row.place, "test_cases", test, found)


def _check_code(place: str, column: str, code: str, found: _Findings) -> None:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError) as error:
        line = f" in line {error.lineno} of it" if isinstance(error, SyntaxError) and error.lineno else ""
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        found.add("problem", "syntax", f"{place}: the code in column {column!r} does not parse: {what}{line}")


def _check_duplicates(problems: Sequence[Problem], found: _Findings) -> None:
    first: dict[str, Problem] = {}
    for problem in problems:
        text = repr(problem.prompt).strip()
        known = first.setdefault(text, problem)
        if known is problem:
            continue
        other = known.columns.get("answer") != problem.columns.get("answer")
        which = "with another answer" if other else "with the same answer"
        found.add("warning", "duplicate", f"{problem.place}: repeats the question of {known.place}, {which}")


def _check_lengths(
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    limit: int | None,
    template_kwargs: Mapping[str, Any],
    found: _Findings,
) -> None:
    places: list[str] = []
    rendered: list[Rendered] = []
    for problem in problems:
        try:
            rendered.append(render(problem, tokenizer=tokenizer, template_kwargs=template_kwargs))
            places.append(problem.place)
        except DataError as error:
            found.add("problem", "template", str(error))
    if not rendered:
        return
    try:
        lengths = [len(ids) for ids in tokenize(places, rendered, tokenizer)]
    except DataError as error:
        found.add("problem", "tokens", str(error))
        return
    found.add("note", "length", f"prompts have {_spread(lengths)} tokens")
    for place, length in zip(places, lengths, strict=True):
        if limit is not None and length > limit:
            found.add("warning", "too long", f"{place}: the prompt has {length} tokens, but only {limit} are allowed")
    answers = [str(p.columns["answer"]) for p in problems if not is_blank(p.columns.get("answer"))]
    if answers:
        tokens = [len(ids) for ids in tokenizer(answers, add_special_tokens=False)["input_ids"]]  # type: ignore[union-attr]
        found.add(
            "note",
            "answer length",
            f"answers have {_spread(tokens)} tokens; sampling.max_completion_length must leave room for the longest, "
            "and for the model's text before it",
        )


def _spread(lengths: Sequence[int]) -> str:
    ordered = sorted(lengths)
    high = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return f"{statistics.median(ordered):g} (median), {high} (95 % are shorter), at most {ordered[-1]}"


def _advice(count: int) -> tuple[Level, str, str]:
    if count == 0:
        return "problem", "size", "no problem to train on remains"
    if count < 100:
        return "warning", "size", f"{count} problems: enough for trials, but too few to hold some out; aim for 1,000"
    sizes = ((1_000, "trying things"), (10_000, "a prototype"), (50_000, "a small run"), (100_000, "a large run"))
    good_for = next((use for limit, use in sizes if count < limit), "the largest runs")
    return "note", "size", f"{count:,} problems, enough for {good_for}: each is seen again after {count:,} prompts"
