"""Search of a run's rollouts by text, reward and step, and the display of one as a conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from lachesis.common.errors import DataError
from lachesis.common.run_files import run_paths
from lachesis.common.types import Sample
from lachesis.metrics.sinks.jsonl import read_metrics
from lachesis.metrics.sinks.tape import read_groups, read_lines, tape_files
from lachesis.web.tokens import token_spans

_EXCERPT = 100
# Beginnings of messages in chat templates: Qwen's and others', Llama's, Gemma's, and Mistral's for tools.
_ROLE = re.compile(r"(?:<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>)\s*(\w+)|\[(TOOL)_RESULTS\]")


@dataclass(frozen=True, slots=True)
class Query:
    """Search conditions, all of which have to hold if set.

    ``text`` is searched in prompts and completions, ignoring case. ``environment`` may also be the name of one of
    several sources.
    """

    text: str = ""
    first_step: int | None = None
    last_step: int | None = None
    least: float | None = None
    most: float | None = None
    prompt_id: str | None = None
    environment: str | None = None


@dataclass(frozen=True, slots=True)
class Hit:
    """Sample that was found: sample ``number`` of group ``group`` of a step's tape, both counted from 1."""

    step: int
    group: int
    number: int
    prompt_id: str
    reward: float | None
    advantage: float | None
    finish: str
    versions: tuple[int, int]
    tokens: int
    excerpt: str

    @property
    def place(self) -> str:
        """Return the sample's place as users write it: STEP:GROUP:NUMBER."""
        return f"{self.step}:{self.group}:{self.number}"


@dataclass(frozen=True, slots=True)
class FailedRollout:
    """Rollout without a reward.

    ``step`` is the step during which it failed; ``None`` if no step has ended since.
    """

    step: int | None
    cause: str
    prompt_id: str
    message: str


@dataclass(frozen=True, slots=True)
class SearchedTurn:
    """Part of a conversation that was sampled by the model or given to it.

    ``sequence`` has the tokens for the viewer (:func:`~lachesis.web.tokens.token_spans`), ``None`` if their texts are
    unknown.
    """

    role: str
    text: str
    sampled: bool
    sequence: Mapping[str, Any] | None = None


def search(run_dir: Path, query: Query) -> Iterator[Hit]:
    """Yield the matching samples of a run's tape, the latest step first.

    Raises:
        DataError: the run has no tape, or a file of it is malformed.
    """
    files = _tape(run_dir)
    for step in reversed(files):
        if (query.first_step or 0) <= step <= (step if query.last_step is None else query.last_step):
            for group, line in enumerate(read_lines(files[step]), start=1):
                yield from _hits(step, group, line, query)


def _hits(step: int, group: int, line: Mapping[str, Any], query: Query) -> Iterator[Hit]:
    prompt = line["prompt"]
    if query.prompt_id not in (None, str(prompt["id"])):
        return
    columns = prompt.get("columns", {})
    names = (None, str(columns.get("env_id")), columns.get("environment"), prompt.get("source"))
    if query.environment not in names:
        return
    text = query.text.lower()
    in_prompt = text in prompt["text"].lower()
    for number, sample in enumerate(line["samples"], start=1):
        found = sample["text"].lower().find(text)
        if (in_prompt or found >= 0) and _fits(sample, query):
            yield Hit(
                step=step,
                group=group,
                number=number,
                prompt_id=str(prompt["id"]),
                reward=sample["reward"],
                advantage=sample["advantage"],
                finish=sample["finish_reason"],
                versions=(sample["versions"][0], sample["versions"][1]),
                tokens=len(sample["completion_ids"]),
                excerpt=_excerpt(sample["text"], max(0, found)),
            )


def _fits(sample: Mapping[str, Any], query: Query) -> bool:
    reward = sample["reward"]
    if (query.least is not None or query.most is not None) and reward is None:
        return False
    return (query.least is None or reward >= query.least) and (query.most is None or reward <= query.most)


def _excerpt(text: str, at: int) -> str:
    start = max(0, at - _EXCERPT // 4)
    part = " ".join(text[start : start + _EXCERPT].split())
    return ("… " if start else "") + part + (" …" if start + _EXCERPT < len(text) else "")


def failures(run_dir: Path) -> list[FailedRollout]:
    """Return the failed rollouts that a run has stored, the latest first.

    Raises:
        DataError: a line of failures.jsonl is malformed.
    """
    paths = run_paths(Path(run_dir))
    if not paths["failures"].exists():
        return []
    ended = read_metrics(paths["metrics"]).steps if paths["metrics"].exists() else ()
    found: list[FailedRollout] = []
    for number, text in enumerate(paths["failures"].read_text(encoding="utf-8").splitlines(keepends=True), start=1):
        if not text.endswith("\n"):  # cut short by a kill, or still being written
            break
        try:
            line = json.loads(text)
            step = next((one.step for one in ended if one.time >= line["time"]), None)
            found.append(FailedRollout(step, line["cause"], line["prompt"], line["message"]))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{paths['failures']}, line {number}: not a failed rollout ({error})", remedy="remove the line"
            ) from error
    return found[::-1]


def read_sample(run_dir: Path, place: str) -> tuple[Hit, list[SearchedTurn]]:
    """Return the sample at STEP:GROUP:NUMBER and its conversation: the prompt's messages, then turn by turn.

    Raises:
        DataError: there is none.
    """
    words = re.fullmatch(r"(\d{1,18}):(\d{1,18}):(\d{1,18})", place)
    if words is None:
        raise DataError(f"{place[:80]!r} is not the place of a rollout", remedy="write STEP:GROUP:NUMBER")
    step, group, number = (int(word) for word in words.groups())
    path = _tape(run_dir).get(step)
    lines = [] if path is None else list(read_lines(path))
    if not 1 <= group <= len(lines) or not 1 <= number <= len(lines[group - 1]["samples"]):
        raise DataError(f"there is no rollout {place}", remedy="search without a place to list them")
    line = lines[group - 1]
    hit = [*_hits(step, group, line, Query())][number - 1]
    return hit, conversation(line["prompt"], line["samples"][number - 1], texts=_known_texts(lines))


def _known_texts(lines: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Return texts of tokens by id, as far as a step's tape has them: it writes them only for its first groups."""
    return {
        token: text
        for line in lines
        for sample in line["samples"]
        for token, text in zip(sample["completion_ids"], sample.get("pieces", ()), strict=False)
    }


def conversation(
    prompt: Mapping[str, Any], sample: Mapping[str, Any], *, texts: Mapping[int, str]
) -> list[SearchedTurn]:
    """Return the prompt's messages, and a sample's turns: stretches of tokens, sampled or given in between."""
    messages = prompt.get("messages")
    if isinstance(messages, list):
        turns = [SearchedTurn(str(one.get("role", "prompt")), str(one.get("content", "")), False) for one in messages]
    else:
        turns = [SearchedTurn("prompt", prompt["text"], False)]
    ids = sample["completion_ids"]
    pieces = sample.get("pieces") or [texts.get(token) for token in ids]
    if None in pieces or len(pieces) != len(ids):
        return [*turns, SearchedTurn("assistant", sample["text"], True)]
    mask = sample["mask"] or [1] * len(ids)
    for counted, run in groupby(range(len(ids)), key=lambda i: bool(mask[i])):
        places = [*run]
        own = [str(pieces[i]) for i in places]
        text = "".join(own)
        role = "assistant" if counted else _role(text)
        sequence = token_spans(own, [sample["logprobs"][i] for i in places], given=[not counted] * len(places))
        turns.append(SearchedTurn(role, text, counted, sequence))
    return turns


def _role(text: str) -> str:
    """Return the role of given text: that of its first message."""
    found = _ROLE.search(text)
    return "given" if found is None else (found[1] or found[2]).lower()


def read_steps(words: str | None) -> tuple[int | None, int | None]:
    """Parse first and last step of ``12`` or ``10-20``; ``None`` means any. Raises DataError."""
    if words is None:
        return None, None
    found = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", words.strip())
    if found is None:
        raise DataError(f"{words[:80]!r} is neither a step nor FIRST-LAST", remedy="write 12 or 10-20")
    return int(found[1]), int(found[2] or found[1])


def read_samples(run_dir: Path, steps: str | None) -> Iterator[tuple[int, int, int, Sample]]:
    """Yield the samples of all groups of these steps, with step, number of the group and number. Raises DataError."""
    first, last = read_steps(steps)
    for step, path in _tape(run_dir).items():
        if (first is None or step >= first) and (last is None or step <= last):
            for number, group in enumerate(read_groups(path), start=1):
                yield from ((step, number, place, sample) for place, sample in enumerate(group.samples, start=1))


def _tape(run_dir: Path) -> dict[int, Path]:
    files = tape_files(run_paths(Path(run_dir))["rollouts"])
    if not files:
        raise DataError(f"{run_dir} has no rollouts", remedy="give the directory of a run whose logging.tape is on")
    return files


def trace_of(sample: Sample, *, name: str) -> dict[str, Any]:
    """Return a sample as a trace: a turn for each stretch of tokens that the model sampled, named after ``name``."""
    return {"schema_version": 1, "turns": list(_calls(sample, name))}


def _calls(sample: Sample, name: str) -> Iterator[dict[str, Any]]:
    ids, place = sample.completion_ids, 0
    for own, bits in groupby(sample.loss_mask()):
        start, place = place, place + len(list(bits))
        if own:
            prompt = [*sample.prompt_ids, *ids[:start]]
            yield {
                "node_id": f"{name}-{start}",
                "prompt_token_ids": prompt,
                "completion_token_ids": list(ids[start:place]),
                "per_token_logps": list(sample.logprobs[start:place]),
                "loss_mask": [0] * len(prompt) + [1] * (place - start),
            }
