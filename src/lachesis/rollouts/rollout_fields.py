"""What a rollout function returned, checked field by field."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lachesis.common.errors import EngineError
from lachesis.rollouts.rewards.functions import shorten

_REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
# Rounding may lift the logprob of a certain token a little above 0.
_MOST_LOGPROB = 1e-3


@dataclass(frozen=True, slots=True)
class Fields:
    """A rollout of N completions; ``logprobs`` are NaN where unknown, ``extras`` has N values for each name."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[float]]
    env_mask: list[list[int]] | None
    extras: dict[str, list[Any]]


def read_fields(output: object, *, name: str, prompts: int, num_generations: int, vocab_size: int) -> Fields:
    """Check what the rollout function ``name`` returned for ``prompts`` prompts, each given ``num_generations`` times.

    Lists may be tensors or arrays. A logprob may stand in a list of its own. ``vocab_size`` is the model's; larger ids
    are those of another tokenizer.

    Raises:
        EngineError: something is missing, of the wrong type, length or range; the message names field and entry.
    """
    if not isinstance(output, Mapping):
        raise _fault(name, f"returned a {type(output).__name__}, no dictionary")
    if missing := [field for field in _REQUIRED if field not in output]:
        raise _fault(name, f"returned no {missing[0]!r}; it returned {', '.join(map(str, output)) or 'nothing'}")
    count = prompts * num_generations
    prompt_ids = _token_lists(output["prompt_ids"], "prompt_ids", name, prompts, num_generations)
    completion_ids = _token_lists(output["completion_ids"], "completion_ids", name, prompts, num_generations)
    _check_vocabulary(prompt_ids, "prompt_ids", name, vocab_size)
    _check_vocabulary(completion_ids, "completion_ids", name, vocab_size)
    env_mask = output.get("env_mask")
    return Fields(
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        logprobs=_logprobs(output["logprobs"], completion_ids, name),
        env_mask=None if env_mask is None else _masks(env_mask, completion_ids, name),
        extras={
            str(field): _extra(field, values, count, name)
            for field, values in output.items()
            if field not in (*_REQUIRED, "env_mask", "logprob_token_ids")
        },
    )


def _token_lists(value: object, field: str, name: str, prompts: int, num_generations: int) -> list[list[int]]:
    rows = _rows(value, field, name)
    count = prompts * num_generations
    if len(rows) != count:
        hint = ""
        if len(rows) == count * num_generations or len(rows) == prompts:
            hint = "; each prompt comes num_generations times already, so one completion per entry is asked for"
        raise _fault(name, f"returned {len(rows)} {field} for {count} prompts{hint}")
    for index, row in enumerate(rows):
        if not row or not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in row):
            raise _fault(name, f"{field}[{index}] is {shorten(row)}, not a list of token ids")
    return rows


def _check_vocabulary(rows: Sequence[Sequence[int]], field: str, name: str, vocab_size: int) -> None:
    for index, row in enumerate(rows):
        if (token := max(row)) >= vocab_size:
            raise EngineError(
                f"the rollout function {name!r}: {field}[{index}] has the token {token}, and the model's vocabulary "
                f"{vocab_size}",
                remedy="take token ids of the model's own tokenizer, trainer.processing_class",
            )


def _logprobs(value: object, completion_ids: Sequence[Sequence[int]], name: str) -> list[list[float]]:
    if value is None:
        return [[math.nan] * len(ids) for ids in completion_ids]
    rows = [[_single(number) for number in row] for row in _rows(value, "logprobs", name)]
    _check_lengths(rows, completion_ids, "logprobs", name)
    for index, row in enumerate(rows):
        for number in row:
            good = isinstance(number, float | int) and not math.isinf(number) and not number > _MOST_LOGPROB
            if not good:
                raise _fault(name, f"logprobs[{index}] has {shorten(number)}, no logprob")
    return [[float(number) for number in row] for row in rows]


def _masks(value: object, completion_ids: Sequence[Sequence[int]], name: str) -> list[list[int]]:
    rows = _rows(value, "env_mask", name)
    _check_lengths(rows, completion_ids, "env_mask", name)
    for index, row in enumerate(rows):
        if any(bit not in (0, 1) for bit in row):
            raise _fault(name, f"env_mask[{index}] is {shorten(row)}, not zeros and ones")
    return [[int(bit) for bit in row] for row in rows]


def _extra(field: object, values: object, count: int, name: str) -> list[Any]:
    """A value per completion; what is no list is the same for all."""
    values = _plain(values)
    if not isinstance(values, list | tuple):
        return [values] * count
    if len(values) != count:
        raise _fault(name, f"returned {len(values)} values in {field!r} for {count} completions")
    return list(values)


def _rows(value: object, field: str, name: str) -> list[Any]:
    value = _plain(value)
    rows = [_plain(row) for row in value] if isinstance(value, list | tuple) else None
    if rows is None or not all(isinstance(row, list | tuple) for row in rows):
        raise _fault(name, f"{field} is {shorten(value)}, not a list with a list per completion")
    return [list(row) for row in rows]


def _check_lengths(
    rows: Sequence[Sequence[Any]], completion_ids: Sequence[Sequence[int]], field: str, name: str
) -> None:
    if len(rows) != len(completion_ids):
        raise _fault(name, f"returned {len(rows)} {field} for {len(completion_ids)} completions")
    for index, (row, ids) in enumerate(zip(rows, completion_ids, strict=True)):
        if len(row) != len(ids):
            raise _fault(name, f"{field}[{index}] has {len(row)} values for {len(ids)} tokens")


def _single(number: Any) -> Any:
    return number[0] if isinstance(number, list | tuple) and len(number) == 1 else number


def _plain(value: Any) -> Any:
    return value.tolist() if callable(getattr(value, "tolist", None)) else value


def _fault(name: str, what: str) -> EngineError:
    return EngineError(
        f"the rollout function {name!r}: {what}",
        remedy="return prompt_ids, completion_ids and logprobs with one entry for each prompt that it was given",
    )
