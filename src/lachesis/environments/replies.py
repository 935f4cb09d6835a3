"""Answers of inference servers, in the shapes that they have: from JSON to completions. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lachesis.common.errors import EngineError
from lachesis.common.types import UNKNOWN_VERSIONS, Completion, FinishReason, VersionSpan
from lachesis.engines.http.control import malformed

# A rounding error of a log-softmax; anything above is no logprob.
_ROUNDING = 1e-4
_FINISH_REASONS: dict[Any, FinishReason] = {
    "stop": "stop", "length": "length", "abort": "abort", "tool_calls": "stop", "eos": "stop",
}  # fmt: skip
_NO_LOGPROBS = (
    "serve the model with `lachesis serve`, or with a server that returns the logprobs of sampled tokens; "
    "rollouts without them cannot be trained on"
)


def read_generate(reply: Mapping[str, Any], *, n: int, url: str) -> list[Completion]:
    """The completions in an answer of ``/generate``: ours with its compact lists, or the documented shape alone.

    The documented shape has ``logprobs[completion][position] == [{token id: logprob}]``, the sampled token first.

    Raises:
        EngineError: there are no logprobs, or the answer is not whole.
    """
    try:
        reasons = reply["finish_reasons"]
        if reply.get("token_logprobs") is not None and reply.get("token_ids") is not None:
            ids, logprobs = reply["token_ids"], reply["token_logprobs"]
        elif reply.get("logprobs"):
            pairs = [[next(iter(position[0].items())) for position in row] for row in reply["logprobs"]]
            ids = [[int(token) for token, _ in row] for row in pairs]
            logprobs = [[value for _, value in row] for row in pairs]
        else:
            raise _without(url)
        versions = reply.get("weight_version") or [None] * n
        return _completions(ids, logprobs, reasons, versions, n=n, url=url)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, StopIteration) as error:
        raise malformed(url, "/generate", error) from error


def read_completions(reply: Mapping[str, Any], *, n: int, url: str) -> list[Completion]:
    """The completions in an answer of ``/v1/completions`` that was asked for token ids and logprobs.

    Raises:
        EngineError: there are no logprobs or no token ids, or the answer is not whole.
    """
    try:
        choices = sorted(reply["choices"], key=lambda choice: choice["index"])
        logprobs: list[Any] = [(choice.get("logprobs") or {}).get("token_logprobs") for choice in choices]
        if any(row is None for row in logprobs):
            raise _without(url)
        ids: list[Any] = [choice.get("token_ids") for choice in choices]
        if any(row is None for row in ids):
            raise EngineError(
                f"{url}/v1/completions returned no token ids",
                remedy="use a server that knows return_token_ids, or --openai.server_type vllm",
            )
        reasons = [choice["finish_reason"] for choice in choices]
        return _completions(ids, logprobs, reasons, [None] * n, n=n, url=url)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise malformed(url, "/v1/completions", error) from error


def _completions(
    ids: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    reasons: Sequence[Any],
    versions: Sequence[Mapping[str, int] | None],
    *,
    n: int,
    url: str,
) -> list[Completion]:
    if not len(ids) == len(logprobs) == len(reasons) == len(versions) == n:
        raise ValueError(f"{len(ids)} completions with {len(logprobs)} lists of logprobs, asked for {n}")
    return [_sampled(*row, url=url) for row in zip(ids, logprobs, reasons, versions, strict=True)]


def _sampled(
    ids: Sequence[int], logprobs: Sequence[float], reason: Any, versions: Mapping[str, int] | None, *, url: str
) -> Completion:
    if len(ids) != len(logprobs) or any(value is None for value in logprobs):
        raise _without(url, f"for {len(ids)} tokens there are {sum(v is not None for v in logprobs)}")
    for position, value in enumerate(logprobs):
        if not -math.inf < value <= _ROUNDING:
            raise _without(url, f"the one at position {position} is {value}, which is no logprob")
    # ``_FINISH_REASONS[reason]`` raises KeyError for a word that no server of the contract says.
    return Completion(
        token_ids=tuple(int(token) for token in ids),
        logprobs=tuple(min(0.0, float(value)) for value in logprobs),
        finish_reason=_FINISH_REASONS[reason],
        versions=UNKNOWN_VERSIONS if versions is None else VersionSpan(int(versions["first"]), int(versions["last"])),
    )


def _without(url: str, detail: str = "") -> EngineError:
    what = f": {detail}" if detail else ""
    return EngineError(f"the inference server at {url} returned no usable logprobs{what}", remedy=_NO_LOGPROBS)
