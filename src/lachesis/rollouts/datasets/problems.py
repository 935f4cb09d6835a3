"""Preparation of datasets into prompts: read, transform, convert, render, tokenize."""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar

from lachesis.common.errors import DataError
from lachesis.common.objects import names_object, object_named
from lachesis.common.prompt_images import PromptImages
from lachesis.common.types import Message, Prompt
from lachesis.process.garbage import uncollected
from lachesis.rollouts.datasets.formats import Format, Problem, detect_format, to_problems
from lachesis.rollouts.datasets.problem_cache import (
    PreparedProblem,
    key_of,
    load_prepared,
    save_prepared,
    tokenizer_digest,
)
from lachesis.rollouts.datasets.rendering import Rendered, checked_template_kwargs, render, tokenize
from lachesis.rollouts.datasets.rows import (
    PREFIX,
    Row,
    aligned,
    column_names,
    is_hub_name,
    read_bytes,
    read_file,
    read_library,
    read_made,
    read_object,
    select,
)
from lachesis.rollouts.datasets.stream import FOLLOW_UP
from lachesis.rollouts.datasets.transforms import TransformSpec, source_digest, transform_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_Rendered: TypeAlias = tuple[int, Problem, Rendered, list[Any]]
"""A row number, a problem of that row, its prompt and its images."""
In = TypeVar("In")
Out = TypeVar("Out")


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset and how to read it.

    Args:
        path: a file, a directory, a name on the hub, or tasks of reasoning-gym, as in ``reasoning_gym:chain_sum``.
        name: configuration of a dataset on the hub that has several.
        split: ``train``, or a part of one such as ``train[:100]``.
        format: one of :data:`~lachesis.rollouts.datasets.formats.Format`, or ``auto``.
        transform: import path of a function to apply to each row first.
        prompt_column: the column with the prompt, in the format ``prompt``.
    """

    path: str
    name: str | None = None
    split: str = "train"
    format: str = "auto"
    transform: str | None = None
    prompt_column: str = "prompt"


@dataclass(frozen=True, slots=True)
class Preparation:
    """Settings that all datasets of a run share."""

    tokenizer: PreTrainedTokenizerBase
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    system_prompt: str | None = None
    conversations: bool = False
    base_dir: Path = field(default_factory=Path.cwd)
    transform_config: Mapping[str, Any] = field(default_factory=dict)
    prepared_path: Path | None = None
    processes: int = 1
    images: ImageReader | None = None


class ImageReader(Protocol):
    """The contract of :class:`lachesis.plugins.vision.reading.ImageReader`, which reads prompts with images."""

    def prepare(self, problem: Problem, *, directory: Path) -> tuple[Problem, list[Any]]: ...

    def answer(
        self, text: str, *, messages: Sequence[Message], given: Sequence[Mapping[str, Any]]
    ) -> tuple[tuple[int, ...], PromptImages]: ...

    def encode(
        self, text: str, images: Sequence[Any], *, place: str, special_tokens: bool
    ) -> tuple[tuple[int, ...], PromptImages]: ...


def load_problems(
    path: str | Path | Dataset,
    *,
    tokenizer: PreTrainedTokenizerBase,
    more: Sequence[Dataset] = (),
    system_prompt: str | None = None,
    conversations: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    max_prompt_length: int | None = None,
    overlong: Literal["error", "drop"] = "error",
    prepared_path: str | Path | None = None,
    processes: int | None = None,
    base_dir: Path | None = None,
    transform_config: Mapping[str, Any] | None = None,
    images: ImageReader | None = None,
) -> list[Prompt]:
    """Read, render and tokenize the problems of one or several datasets.

    A string is tokenized unchanged, with the special tokens that the tokenizer adds to plain text. A list of messages
    goes through the chat template, with a generation prompt, or to continue the last message if it is the assistant's.
    Questions of the other formats are conversations if the tokenizer has a chat template, and texts otherwise. Prompt
    ids are the index of the row, counted from 0 over all datasets, so they stay the same whatever is dropped; a
    follow-up question has its row's id and ``+1``. Every prompt has all columns; a row without one has ``None``.

    Args:
        path: the first dataset, as a path alone if no options are needed; ``more`` are further ones.
        system_prompt: put before prompts without a system message; it turns texts into conversations.
        conversations: True if a text prompt is a user message.
        max_prompt_length: longest prompt in tokens; ``None`` allows any.
        overlong: ``error`` stops at a longer prompt, ``drop`` leaves it out (and logs how many).
        prepared_path: directory for prepared problems, stored under a key derived from all inputs.
        processes: number of processes that transform and render; one if unset.
        base_dir: directory in which to look for transforms; the current one if unset.
        transform_config: the argument of a ``prompt_transform(cfg)``, with Axolotl's names.
        images: reader of the rows' images; if unset, images are refused.

    Raises:
        DataError: a dataset is missing, empty or malformed, a prompt is missing, empty, of the wrong type or
            too long, a transform failed, or nothing remains; the message names file and line.
        ConfigError: ``chat_template_kwargs`` sets a reserved variable, or a transform does not exist.
    """
    first = path if isinstance(path, Dataset) else Dataset(str(path))
    preparation = Preparation(
        tokenizer=tokenizer,
        template_kwargs=checked_template_kwargs(chat_template_kwargs),
        system_prompt=system_prompt,
        conversations=conversations,
        base_dir=(base_dir or Path()).resolve(),
        transform_config=dict(transform_config or {}),
        prepared_path=None if prepared_path is None else Path(prepared_path),
        processes=processes or 1,
        images=images,
    )
    prepared: list[PreparedProblem] = []
    with uncollected():  # the garbage collector would scan the objects of all rows again and again
        for index, dataset in enumerate([first, *more]):
            prepared += _renumbered(_prepare(dataset, index, preparation), after=prepared)
    return _with_all_columns(_within_limit(prepared, max_prompt_length, overlong, first.path))


def read_rows(dataset: Dataset) -> tuple[list[Row], str]:
    """Return the rows of a dataset unchanged, and a digest of their content. Raises DataError, ConfigError."""
    if names_object(dataset.path):
        rows, digest = read_object(object_named(dataset.path), name=dataset.path.rpartition(".")[2])
        split = dataset.split if "[" in dataset.split else "train"  # an object is one split, whatever its name is
        return aligned(select(rows, split, Path(dataset.path))), digest
    if dataset.path.startswith(PREFIX):
        rows, digest = read_made(dataset.path)
        return aligned(select(rows, dataset.split, Path(dataset.path))), digest
    path = Path(dataset.path).expanduser()
    if path.is_dir() or is_hub_name(dataset.path):
        rows, digest = read_library(dataset.path, name=dataset.name, split=dataset.split)
        return aligned(rows), digest
    rows = select(read_file(path), dataset.split, path)
    return rows, hashlib.sha256(read_bytes(path)).hexdigest()


def _prepare(dataset: Dataset, index: int, preparation: Preparation) -> list[PreparedProblem]:
    """Return one dataset, from the store or newly prepared; ids are indices in this dataset."""
    rows, digest = read_rows(dataset)
    named = None
    if dataset.transform is not None:
        named = TransformSpec(dataset.transform, preparation.base_dir, preparation.transform_config, index)
    if preparation.prepared_path is None:
        return _make(dataset, rows, named, preparation)
    key = key_of(
        {
            "dataset": [getattr(dataset, name) for name in Dataset.__slots__],
            "content": digest,
            "tokenizer": tokenizer_digest(preparation.tokenizer),
            "template": preparation.template_kwargs,
            "system": preparation.system_prompt,
            "conversations": preparation.conversations,
            "transform": [source_digest(named), preparation.transform_config, index] if named else None,
        }
    )
    kept = load_prepared(preparation.prepared_path, key)
    if kept is not None:
        return kept
    made = _make(dataset, rows, named, preparation)
    save_prepared(preparation.prepared_path, key, made)
    return made


def _make(
    dataset: Dataset, rows: list[Row], named: TransformSpec | None, preparation: Preparation
) -> list[PreparedProblem]:
    tokenizer = preparation.tokenizer
    if named is not None:
        rows = aligned(_mapped(partial(transform_rows, named=named, tokenizer=tokenizer), rows, preparation.processes))
    data_format = detect_format(
        column_names(rows), prompt_column=dataset.prompt_column, wanted=dataset.format, dataset=dataset.path
    )
    work = partial(_render_rows, dataset=dataset, data_format=data_format, preparation=preparation)
    done = _mapped(work, list(enumerate(rows)), preparation.processes)
    token_ids, images = _encoded(done, preparation)
    return [
        PreparedProblem(
            problem.place,
            Prompt(
                id=f"{number}{FOLLOW_UP}{problem.turn}" if problem.turn else str(number),
                token_ids=ids,
                text=rendered.text,
                messages=rendered.messages,
                columns=problem.columns,
                images=shown,
            ),
        )
        for (number, problem, rendered, _), ids, shown in zip(done, token_ids, images, strict=True)
    ]


def _encoded(
    done: Sequence[_Rendered], preparation: Preparation
) -> tuple[list[tuple[int, ...]], list[PromptImages | None]]:
    """Return the token ids of rendered problems, and their images as model inputs."""
    texts = [(problem.place, rendered) for _, problem, rendered, images in done if not images]
    of_texts = iter(tokenize([place for place, _ in texts], [one for _, one in texts], preparation.tokenizer))
    token_ids: list[tuple[int, ...]] = []
    shown: list[PromptImages | None] = []
    for _, problem, rendered, images in done:
        ids, made = next(of_texts) if not images else (), None
        if images:
            assert preparation.images is not None
            ids, made = preparation.images.encode(
                rendered.text, images, place=problem.place, special_tokens=rendered.special_tokens
            )
        token_ids.append(ids)
        shown.append(made)
    return token_ids, shown


def _render_rows(
    rows: Sequence[tuple[int, Row]], *, dataset: Dataset, data_format: Format, preparation: Preparation
) -> list[_Rendered]:
    """Convert numbered rows to rendered problems with images; a row with a follow-up gives two."""
    template_kwargs = preparation.template_kwargs
    reader, path = preparation.images, Path(dataset.path).expanduser()
    directory = path.parent if path.is_file() else preparation.base_dir
    conversation = bool(preparation.tokenizer.chat_template or "chat_template" in template_kwargs)
    prepared = [
        (number, *((problem, list[Any]()) if reader is None else reader.prepare(problem, directory=directory)))
        for number, row in rows
        for problem in to_problems(
            row,
            data_format=data_format,
            prompt_column=dataset.prompt_column,
            conversation=conversation,
            system_prompt=preparation.system_prompt,
            conversations=preparation.conversations,
            images=reader is not None,
        )
    ]
    return [
        (number, one, render(one, tokenizer=preparation.tokenizer, template_kwargs=template_kwargs), images)
        for number, one, images in prepared
    ]


def _mapped(work: Callable[[Sequence[In]], list[Out]], items: Sequence[In], processes: int) -> list[Out]:
    """Return the results of ``work`` on the items, in order, computed by several processes."""
    processes = min(processes, len(items))
    if processes <= 1:
        return work(items)
    size = -(-len(items) // processes)
    parts = [items[start : start + size] for start in range(0, len(items), size)]
    with ProcessPoolExecutor(len(parts), mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return [made for part in pool.map(work, parts) for made in part]
        except BrokenProcessPool as error:
            raise DataError(
                "a process that prepared the data died; it may have run out of memory", remedy="lower data.processes"
            ) from error


def _renumbered(found: Sequence[PreparedProblem], *, after: Sequence[PreparedProblem]) -> list[PreparedProblem]:
    """Return the problems of a further dataset, with ids that continue those before it."""
    if not after:
        return list(found)
    offset = 1 + int(after[-1].prompt.id.partition(FOLLOW_UP)[0])

    def renamed(prompt_id: str) -> str:
        number, mark, turn = prompt_id.partition(FOLLOW_UP)
        return f"{int(number) + offset}{mark}{turn}"

    return [PreparedProblem(one.place, replace(one.prompt, id=renamed(one.prompt.id))) for one in found]


def _with_all_columns(prepared: Sequence[PreparedProblem]) -> list[Prompt]:
    prompts = [one.prompt for one in prepared]
    names = list(dict.fromkeys(name for prompt in prompts for name in prompt.columns))
    return [
        prompt
        if len(prompt.columns) == len(names)
        else replace(prompt, columns={name: prompt.columns.get(name) for name in names})
        for prompt in prompts
    ]


def _within_limit(
    prepared: list[PreparedProblem], limit: int | None, overlong: Literal["error", "drop"], path: str
) -> list[PreparedProblem]:
    if limit is None:
        return prepared
    long = [one for one in prepared if len(one.prompt.token_ids) > limit]
    if not long:
        return prepared
    first = f"{long[0].place}: the prompt has {len(long[0].prompt.token_ids)} tokens, but only {limit} are allowed"
    if overlong == "error":
        raise DataError(
            f"{first} ({len(long)} of {len(prepared)} prompts are too long)",
            remedy="raise data.max_prompt_length, or lower sampling.max_completion_length if the model's "
            "context is the limit, or set data.overlong_prompts: drop",
        )
    if len(long) == len(prepared):
        raise DataError(
            f"{path}: all {len(prepared)} prompts have more than {limit} tokens, so none is left",
            remedy="raise data.max_prompt_length",
        )
    logger.warning("%s: dropped %d of %d prompts that are too long; %s", path, len(long), len(prepared), first)
    return [one for one in prepared if len(one.prompt.token_ids) <= limit]
