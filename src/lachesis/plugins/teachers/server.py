"""A teacher behind an address: the logprobs that an OpenAI-compatible server gives to the tokens of a prompt.

``/v1/completions`` with ``prompt_logprobs``, as in vLLM: the prompt is token ids, and the server returns, for each
position, the K likeliest tokens and the one that is there, at temperature 1.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import Any

import httpx

from lachesis.common.deadline import Deadline, Retry
from lachesis.common.errors import EngineError, ModelError
from lachesis.common.http import server_url
from lachesis.common.json_values import is_list, is_object
from lachesis.engines.http.control import CONNECT_RETRIES, KEEP_ALIVE_S, parsed, said_by, tls

logger = logging.getLogger("lachesis")

KEY_VARIABLE = "LACHESIS_TEACHER_KEY"
ROUTE = "/v1/completions"
# Statuses of a server under load, or one that is restarting.
_TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)
_AT_ONCE = 16
# Number of tokens whose texts are compared at once, few enough for any context.
_PROBED_AT_ONCE = 32

Top = dict[int, float]
"""Logprobs of the likeliest tokens at one place, and of the token that is there."""


class TeacherServer:
    """Client of one server, with several requests at once. Each call has a deadline and retries until then.

    Args:
        url: of the server, with or without ``/v1``.
        model: its name there; its only one if unset.
        top_k: tokens to ask for at each place; 0 for only the token in that place.
        key: sent as a bearer token unless it is empty.
    """

    def __init__(self, url: str, *, model: str | None = None, top_k: int = 0, key: str = "") -> None:
        self.url = server_url(url)
        self._named = {} if model is None else {"model": model}
        self._top_k = top_k
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(
                verify=tls(self.url), retries=CONNECT_RETRIES, limits=httpx.Limits(keepalive_expiry=KEEP_ALIVE_S)
            ),
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="lachesis-teacher")

    def tops(self, sequences: Sequence[tuple[int, ...]], *, deadline: Deadline) -> list[list[Top]]:
        """Return the likeliest tokens at each token but the first of each sequence: [sequences][tokens - 1].

        Raises:
            EngineError: the server refuses, gives no such logprobs, or gives those of other tokens.
            DeadlineExceeded: it does not answer in time.
        """
        with deadline.waiting():
            return list(self._threads.map(lambda ids: self._tops(ids, deadline), sequences))

    def check_tokenizer(
        self, tokens: Sequence[str], *, encode: Callable[[str], Sequence[int]], deadline: Deadline
    ) -> None:
        """Compare the ids of texts by the server's ``/tokenize``.

        Args:
            tokens: texts of the policy's tokens.
            encode: the policy's tokenizer, which adds no special tokens.

        Raises:
            ModelError: the server's tokenizer differs.
            EngineError, DeadlineExceeded: as :meth:`tops`.
        """
        starts = range(0, len(tokens), _PROBED_AT_ONCE)
        texts = [" ".join(tokens[start : start + _PROBED_AT_ONCE]) for start in starts]
        with deadline.waiting():
            for text, found in zip(texts, self._threads.map(lambda one: self._ids(one, deadline), texts), strict=True):
                own = list(encode(text))
                if found == own:
                    continue
                theirs, ours = next(pair for pair in zip_longest(found, own) if pair[0] != pair[1])
                raise ModelError(
                    f"the tokenizer of the teacher at {self.url} differs from the policy's: in the text "
                    f"{text[:40]!r} the first token that differs is {theirs} there and {ours} here",
                    remedy="choose a teacher of the policy's family, because it gets the policy's own tokens",
                )

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._http.close()

    def _ids(self, text: str, deadline: Deadline) -> list[int]:
        reply = self._post("/tokenize", {"prompt": text, "add_special_tokens": False} | self._named, deadline)
        ids = reply.get("tokens")
        if not is_list(ids):
            raise EngineError(f"{self.url}/tokenize answered without tokens: {_short(reply)}", remedy=_WHICH)
        return ids

    def _tops(self, ids: tuple[int, ...], deadline: Deadline) -> list[Top]:
        body = {"prompt": list(ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": self._top_k}
        reply = self._post(ROUTE, body | self._named, deadline)
        choices = reply.get("choices")
        first = choices[0] if is_list(choices) and choices else {}
        places = first.get("prompt_logprobs") if is_object(first) else None
        if not is_list(places) or len(places) != len(ids):
            found = "none" if places is None else f"{len(places)} entries"
            raise EngineError(
                f"{self.url}{ROUTE} was asked for prompt_logprobs of {len(ids)} tokens and gave {found}", remedy=_WHICH
            )
        tops = [_top(entry) for entry in places[1:]]
        for place, (top, token) in enumerate(zip(tops, ids[1:], strict=True), 1):
            if token not in top:
                raise EngineError(
                    f"{self.url}{ROUTE} gave no logprob of token {token} at position {place} of the prompt it was "
                    "shown: the teacher has another tokenizer, or changes prompts",
                    remedy=_WHICH,
                )
        return tops

    def _post(self, route: str, body: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
        """Return the answer's object; retry if the server is busy or away."""
        retry = Retry(deadline, first_s=0.5, longest_s=10.0, say=_tell, told_at=2)
        while True:
            try:
                response = self._http.post(f"{self.url}{route}", json=body, timeout=deadline.remaining_s() or 0.001)
                if response.status_code not in _TRY_AGAIN:
                    return self._reply(response, route)
                reason = (
                    f"the teacher at {self.url}{route} answered {response.status_code}: {_short(said_by(response))}"
                )
            except httpx.TransportError as error:
                reason = f"the teacher at {self.url} does not answer ({type(error).__name__}: {error})"
            time.sleep(retry.after(reason))

    def _reply(self, response: httpx.Response, route: str) -> dict[str, Any]:
        if response.is_success:
            reply = parsed(response)
            if is_object(reply):
                return reply
            raise EngineError(f"{self.url}{route} did not return a JSON object: {response.text[:80]!r}", remedy=_WHICH)
        message, status = _short(said_by(response)), response.status_code
        remedy = _WHICH
        if status in (401, 403):
            remedy = f"put the server's key into the variable {KEY_VARIABLE}"
        elif "logprobs" in message and self._top_k:
            remedy = f"start the server with --max-logprobs {self._top_k}, or lower algorithm.teacher.top_k"
        elif status in (400, 413, 422):
            remedy = "correct this; a sequence needs room for one more token in the teacher's context"
        raise EngineError(f"the teacher at {self.url}{route} answered {status}: {message}", remedy=remedy)


_WHICH = "use a server that gives prompt_logprobs for token ids: vLLM's, or `lachesis serve`"


def _tell(reason: str) -> None:
    logger.warning("%s; trying again", reason)


def _top(entry: Any) -> Top:
    """Read logprobs by token from ``{"17": {"logprob": -0.5, ...}}``, or from the bare numbers of ``/generate``."""
    if not is_object(entry):
        return {}
    return {int(token): float(value["logprob"] if is_object(value) else value) for token, value in entry.items()}


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 300 else f"{text[:297]}..."
