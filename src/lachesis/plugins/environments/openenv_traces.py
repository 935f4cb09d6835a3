"""Reader of OpenEnv's ``TrainingTrace`` (0.10, schema 1): the calls of a model in one rollout. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lachesis.common.errors import DataError
from lachesis.common.json_values import read_object

_LISTS = ("prompt_token_ids", "completion_token_ids", "per_token_logps", "loss_mask")


def arrays_of(traces: Sequence[object]) -> dict[str, list[Any]]:
    """Return what a rollout function returns, from a trace for each prompt.

    A trace is OpenEnv's object, its dictionary or its JSON. Calls whose prompts continue each other token by token are
    joined; tokens in between, and those that the trace's own masks exclude, are not trained.

    Raises:
        DataError: a trace is not one of schema 1, or its calls do not continue each other.
    """
    rows = [_joined(_turns(trace, number), number) for number, trace in enumerate(traces)]
    return {name: [row[name] for row in rows] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask")}


def _turns(trace: Any, number: int) -> list[Mapping[str, Any]]:
    try:
        found = trace.model_dump() if hasattr(trace, "model_dump") else trace
        document = read_object(found.encode()) if isinstance(found, str) else found
        turns = list(document["turns"])
        version = document.get("schema_version", 1)
        lengths = [tuple(len(turn[name]) for name in _LISTS) for turn in turns]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _fault(number, f"is not a TrainingTrace: {type(error).__name__}: {error}") from error
    if version != 1:
        raise _fault(number, f"has schema {version!r}; only schema 1 is supported")
    if not turns:
        raise _fault(number, "has no turns")
    for place, (prompt, completion, logprobs, mask) in enumerate(lengths):
        if not prompt or not completion or logprobs != completion or mask != prompt + completion:
            raise _fault(number, f"has different numbers of tokens, logprobs and mask bits in turn {place}")
        if any(turns[place]["loss_mask"][:prompt]):
            raise _fault(number, f"trains tokens of the prompt in turn {place}")
    return turns


def _joined(turns: Sequence[Mapping[str, Any]], number: int) -> dict[str, list[Any]]:
    prompt = list(turns[0]["prompt_token_ids"])
    tokens: list[int] = []
    logprobs: list[float] = []
    mask: list[int] = []
    for place, turn in enumerate(turns):
        before, whole = turn["prompt_token_ids"], [*prompt, *tokens]
        if before[: len(whole)] != whole:
            raise _fault(number, f"begins another conversation in turn {place}; give each conversation its own trace")
        between = before[len(whole) :]
        tokens += [*between, *turn["completion_token_ids"]]
        logprobs += [*[0.0] * len(between), *turn["per_token_logps"]]
        mask += [*[0] * len(between), *turn["loss_mask"][len(before) :]]
    return {"prompt_ids": prompt, "completion_ids": tokens, "logprobs": logprobs, "env_mask": mask}


def _fault(number: int, what: str) -> DataError:
    return DataError(f"traces[{number}] {what}", remedy="return what OpenEnv's fetch_training_trace() gives")
