"""Formats of datasets: detection by columns, and conversion of rows to problems."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast, get_args

from lachesis.common.errors import ConfigError, DataError
from lachesis.rollouts.datasets.rows import Row, describe_type, is_blank

logger = logging.getLogger(__name__)

# Names of columns with the right answer, the likeliest first.
GOLD_COLUMNS = ("response", "solution", "output", "completion", "answer", "target", "label")
Format: TypeAlias = Literal[
    "prompt", "instruction_response", "input_output", "problem_solution", "question_answer", "messages"
]

# Columns with the question and with its answer.
PAIRS: Mapping[str, tuple[str, str]] = {
    "instruction_response": ("instruction", "response"),
    "input_output": ("input", "output"),
    "problem_solution": ("problem", "solution"),
    "question_answer": ("question", "answer"),
}
# Roles of ShareGPT's speakers; other names, such as system, are roles already.
_ROLES = {"human": "user", "gpt": "assistant"}


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem for the model, not yet rendered.

    ``prompt`` is a text or a list of messages, unchecked; ``column`` is where it came from. ``turn`` is 0, or
    1 for the follow-up question of the same row.
    """

    place: str
    turn: int
    column: str
    prompt: Any
    columns: Mapping[str, Any]


def detect_format(columns: Sequence[str], *, prompt_column: str, wanted: str = "auto", dataset: str = "") -> Format:
    """Detect the format by column names; return ``wanted`` unless that is ``auto``.

    A column named ``prompt_column`` is the prompt, whatever else there is.

    Raises:
        ConfigError: ``wanted`` is not a format.
        DataError: the columns fit several formats.
    """
    if wanted != "auto":
        if wanted not in get_args(Format):
            formats = f"auto, {', '.join(get_args(Format))}"
            raise ConfigError(f"data.format {wanted!r} does not exist", remedy=f"choose one of {formats}")
        return cast(Format, wanted)
    found = _fitting(columns) if prompt_column == "prompt" and prompt_column not in columns else ["prompt"]
    if len(found) > 1:
        raise DataError(
            f"the columns of the dataset {dataset} ({', '.join(columns)}) can be read in several ways",
            remedy=f"set data.format to the right one ({', '.join(found)}), or write a transform",
        )
    detected = found[0] if found else "prompt"
    logger.info("%s: format %s, from the columns %s", dataset, detected, ", ".join(columns))
    return cast(Format, detected)


def _fitting(columns: Collection[str]) -> list[str]:
    fitting = [name for name, pair in PAIRS.items() if all(column in columns for column in pair)]
    if "messages" in columns:
        fitting.append("messages")
    if not fitting and "conversations" in columns:  # ShareGPT's
        fitting.append("messages")
    if len(fitting) > 1 and "question_answer" in fitting:  # many datasets have these as additional columns
        fitting.remove("question_answer")
    if fitting == ["input_output"] and "instruction" in columns:  # here "input" belongs to an instruction
        fitting.insert(0, "instruction_response")
    return fitting


# Columns with the images of a prompt, in the order in which they are looked for.
IMAGE_COLUMNS = ("images", "image")
_IMAGES_AS = "rename it to images if it has images"
_WITHOUT = "set model.path to a model for images and text"
# Columns of vision-language data sets, files that they name, first bytes of files, and kinds of parts in messages.
_MEDIA_COLUMN = re.compile(r"(^|_)(image|img|picture|photo|screenshot|video|audio)s?(_|\d*$)", re.IGNORECASE)
_MEDIA_FILE = re.compile(
    r"^data:(image|video|audio)/|\.(png|jpe?g|gif|webp|bmp|tiff?|mp4|webm|mov|wav|mp3|flac)$", re.IGNORECASE
)
_MEDIA_BYTES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM")
_MEDIA_PART = re.compile(r"(input_)?(image|video|audio)(s|_url|_pil)?")


def _is_media(value: Any, *, named: bool) -> bool:
    """Return True for an image, video or sound: bytes, an object of a media library, or Arrow's struct.

    Args:
        named: True if the column's name suggests media; then file names count too.
    """
    if isinstance(value, list | tuple):
        return any(_is_media(one, named=named) for one in value[:8])
    if isinstance(value, Mapping):
        return (
            {"bytes", "path"} <= value.keys() or {"array", "sampling_rate"} <= value.keys() or (named and bool(value))
        )
    if isinstance(value, str):
        return named and _MEDIA_FILE.search(value) is not None
    if isinstance(value, bytes):
        return named or value.startswith(_MEDIA_BYTES)
    return type(value).__module__.startswith("PIL.")


def _media_kinds(part: Any) -> set[str]:
    """Return the kinds of a message part that is not text, by its type or by a key."""
    if not isinstance(part, Mapping):
        return set()
    names = {str(part.get("type")), *(name for name, value in part.items() if value is not None)}
    return {name for name in names if _MEDIA_PART.fullmatch(str(name))}


def _refuse_media(row: Row, *, images: bool) -> None:
    """Raise DataError for media that the model does not get, because it would answer about unseen pictures.

    Args:
        images: True if the model gets images in :data:`IMAGE_COLUMNS` and in message parts.
    """
    shown = "text and images" if images else "text only"
    for name, value in row.columns.items():
        if images and name in IMAGE_COLUMNS:
            continue
        if _is_media(value, named=_MEDIA_COLUMN.search(name) is not None):
            raise DataError(
                f"{row.place}: the column {name!r} has {describe_type(value)}, but this model is trained on {shown}",
                remedy=f"{_IMAGES_AS if images else _WITHOUT}, or remove that column (data.transform) if the text "
                "makes sense without it",
            )
    for name, value in row.columns.items():
        messages: list[Any] = value if isinstance(value, list) else []
        contents = [message.get("content") for message in messages if isinstance(message, dict)]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        kinds = set[str]().union(*map(_media_kinds, parts)) - ({"image"} if images else set[str]())
        if kinds:
            raise DataError(
                f"{row.place}: messages in {name!r} have parts of type {min(kinds)!r}, but this model is trained on "
                f"{shown}",
                remedy="leave out these rows, or replace these parts with text (data.transform)",
            )


def to_problems(
    row: Row,
    *,
    data_format: Format,
    prompt_column: str,
    conversation: bool,
    system_prompt: str | None,
    conversations: bool = False,
    images: bool = False,
) -> list[Problem]:
    """Return the problem of a row; two if it has a follow-up question.

    The answer's column is kept under its own name and also passed on as ``answer``, unless there is one; that of a
    question as ``solution``, which the shipped rewards read.

    Args:
        row: of the dataset.
        data_format: of the row.
        prompt_column: of the prompt.
        conversation: turn a question into messages instead of text; a row with a follow-up always is a conversation.
        conversations: turn a text prompt into messages too.
        system_prompt: put before prompts without a system message; it turns texts into conversations.
        images: True if the model gets the row's images; else they are refused.

    Raises:
        DataError: the question, or the answer that a follow-up needs, is missing or not a text.
    """
    _refuse_media(row, images=images)
    if data_format == "prompt":
        prompt = _as_messages(row.columns.get(prompt_column))
        if conversations and isinstance(prompt, str) and prompt.strip():
            prompt = [_user(prompt)]
        problems = [Problem(row.place, 0, prompt_column, prompt, row.columns)]
    elif data_format == "messages":
        problems = [_from_messages(row)]
    else:
        problems = _from_pair(row, *PAIRS[data_format], conversation=conversation)
    if system_prompt is None:
        return problems
    return [_with_system(problem, system_prompt) for problem in problems]


def _from_messages(row: Row) -> Problem:
    """Split messages that end with the assistant's into the problem and its answer."""
    column = "messages" if "messages" in row.columns else "conversations"
    messages = _as_messages(row.columns.get(column))
    if isinstance(messages, list) and len(messages) > 1:
        last = messages[-1]
        if isinstance(last, Mapping) and last.get("role") == "assistant":
            columns = _with_answer(row.columns, last.get("content"), "response")
            return Problem(row.place, 0, column, messages[:-1], columns)
    return Problem(row.place, 0, column, messages, row.columns)


def _as_messages(prompt: Any) -> Any:
    """Return ShareGPT's turns, ``{"from": "human", "value": ...}``, as messages; anything else unchanged."""
    turns = prompt if isinstance(prompt, list) else []
    if not turns or not all(isinstance(turn, Mapping) and {"from", "value"} <= turn.keys() for turn in turns):
        return prompt
    return [{"role": _ROLES.get(turn["from"], turn["from"]), "content": turn["value"]} for turn in turns]


def _from_pair(row: Row, question: str, answer: str, *, conversation: bool) -> list[Problem]:
    text = _text(row, question)
    columns = _with_answer(row.columns, row.columns.get(answer), "solution" if question == "question" else answer)
    if is_blank(row.columns.get("follow_up")):
        return [Problem(row.place, 0, question, [_user(text)] if conversation else text, columns)]
    first = [_user(text)]
    second = [*first, {"role": "assistant", "content": _text(row, answer)}, _user(_text(row, "follow_up"))]
    return [
        Problem(row.place, 0, question, first, columns),
        Problem(row.place, 1, "follow_up", second, _follow_up_columns(row.columns, answer)),
    ]


def _follow_up_columns(columns: Mapping[str, Any], answer: str) -> dict[str, Any]:
    """Return the columns for the second question, with its own answer and tests, if any."""
    right = columns.get("follow_up_response")
    replaced = dict(columns) | {answer: right, "answer": right}
    if "test_cases" in columns:
        replaced["test_cases"] = columns.get("follow_up_test_cases")
    return replaced


def _with_answer(columns: Mapping[str, Any], answer: Any, name: str) -> dict[str, Any]:
    named = dict(columns) if not is_blank(columns.get(name)) else dict(columns) | {name: answer}
    return named if not is_blank(named.get("answer")) else named | {"answer": answer}


def _with_system(problem: Problem, system_prompt: str) -> Problem:
    prompt = [_user(problem.prompt)] if isinstance(problem.prompt, str) and problem.prompt.strip() else problem.prompt
    if not isinstance(prompt, list) or not prompt:
        return problem  # rendering reports what is wrong with it
    first = prompt[0]
    if not (isinstance(first, Mapping) and first.get("role") == "system"):
        prompt = [{"role": "system", "content": system_prompt}, *prompt]
    return Problem(problem.place, problem.turn, problem.column, prompt, problem.columns)


def _text(row: Row, column: str) -> str:
    value = row.columns.get(column)
    if isinstance(value, str) and value.strip():
        return value
    what = "is empty or missing" if is_blank(value) else f"is {describe_type(value)}, not text"
    raise DataError(f"{row.place}: column {column!r} {what}", remedy="correct this row")


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
