"""Bookkeeping for a batch of sequences: their tokens so far, and where they diverge."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from lachesis.common.routed_experts import RoutedExperts
from lachesis.common.types import Completion, FinishReason, GenerationRequest, VersionSpan

# A finished row costs a place in every later forward pass; dropping rows costs a copy of the KV cache.
_DROP_SHARE = 0.125
_REASONS: tuple[FinishReason, ...] = ("abort", "stop", "length")
_STOP, _LENGTH = 1, 2


@dataclass(frozen=True, slots=True)
class Share:
    """A share of a request in one batch: its completions ``first`` to ``first + count - 1``.

    ``index`` is the index of the request in its call.
    """

    index: int
    request: GenerationRequest
    first: int
    count: int


def plan_batches(
    requests: Sequence[GenerationRequest], *, max_rows: int, equal_lengths: bool = False
) -> list[list[Share]]:
    """Return batches of at most ``max_rows`` sequences: longest prompts first, ties in the order given.

    A request is split only if its ``n`` alone exceeds ``max_rows``. Shares of one request come in the order of their
    completions. With ``equal_lengths``, all prompts of a batch have the same length.
    """
    shares = [
        Share(index, request, first, min(max_rows, request.n - first))
        for index, request in enumerate(requests)
        for first in range(0, request.n, max_rows)
    ]
    shares.sort(key=lambda share: -len(share.request.prompt_ids))
    batches: list[list[Share]] = []
    room = 0
    for share in shares:
        length = len(share.request.prompt_ids)
        if share.count > room or (equal_lengths and length != len(batches[-1][0].request.prompt_ids)):
            batches.append([])
            room = max_rows
        batches[-1].append(share)
        room -= share.count
    return batches


class BatchRows:
    """R sequences that grow a token at a time, as arrays over rows.

    ``all`` [R] are their indices, ``share`` [R] the share of each, ``request`` and ``completion`` [R] its indices in
    the call and in the request's ``n``, ``max_tokens`` the longest completion allowed for any of them.

    Args:
        shares: the shares to decode, in order.
        end_token_ids: tokens that end every sequence.
        decode: token ids to text, for stop strings.
        version: the weight version for the first token.
    """

    def __init__(
        self,
        shares: Sequence[Share],
        *,
        end_token_ids: Sequence[int],
        decode: Callable[[Sequence[int]], str] | None,
        version: int,
    ) -> None:
        self._shares = shares
        self._decode = decode
        params = [share.request.params for share in shares]
        self.share = np.repeat(np.arange(len(shares)), [share.count for share in shares])
        self.all = np.arange(self.share.size)
        self.request = np.array([share.index for share in shares])[self.share]
        self.completion = np.concatenate([np.arange(s.first, s.first + s.count) for s in shares])
        self.max_tokens = max(p.max_tokens for p in params)
        self._limit = np.array([p.max_tokens for p in params])[self.share]
        self._ends = _rectangle([(*end_token_ids, *p.stop_token_ids) for p in params])[self.share]
        self._has_stop = np.array([bool(p.stop) for p in params])[self.share]
        self._tokens = np.zeros((self.all.size, self.max_tokens), dtype=np.int64)
        self._logprobs = np.zeros((self.all.size, self.max_tokens), dtype=np.float32)
        self._length = np.zeros_like(self.all)
        self._reason = np.zeros_like(self.all)
        self._first_version = version
        # Returns the experts of a row, given the length of its completion; None if no request wants them.
        self.routed: Callable[[int, int], RoutedExperts | None] = lambda row, length: None
        self._last_version = np.full_like(self.all, version)

    def record(
        self, live: np.ndarray, *, step: int, tokens: np.ndarray, logprobs: np.ndarray, version: int
    ) -> np.ndarray:
        """Append a token [L] to each row of ``live`` [L]; return bool [L], True for the rows that continue."""
        self._tokens[live, step] = tokens
        self._logprobs[live, step] = logprobs
        self._length[live] = step + 1
        self._last_version[live] = version
        stopped = (tokens[:, None] == self._ends[live]).any(axis=1)
        if self._has_stop.any():
            for i in np.flatnonzero(self._has_stop[live] & ~stopped):
                stopped[i] = self._ends_with_stop(int(live[i]))
        full = self._limit[live] == step + 1
        self._reason[live] = np.where(stopped, _STOP, np.where(full, _LENGTH, 0))
        return ~(stopped | full)

    def reasons(self, live: np.ndarray) -> list[FinishReason | None]:
        """Return the finish reason of each row of ``live`` [L]; ``None`` if it continues."""
        return [_REASONS[reason] if reason else None for reason in self._reason[live].tolist()]

    def routed_of(self, live: np.ndarray) -> list[RoutedExperts | None]:
        """Return the experts of each row of ``live`` [L] that has ended.

        ``None`` for rows that continue, or whose experts were not requested.
        """
        ended, lengths = self._reason[live] > 0, self._length[live].tolist()
        rows = zip(live.tolist(), lengths, ended.tolist(), strict=True)
        return [self.routed(row, length) if over else None for row, length, over in rows]

    def complete(self, ended: np.ndarray, live: np.ndarray) -> Iterator[tuple[Share, list[Completion]]]:
        """Yield the shares completed by the end of rows ``ended`` [E]: none of their rows is in ``live`` [L]."""
        numbers = np.setdiff1d(self.share[ended], self.share[live])
        shares = [self._shares[number] for number in numbers.tolist()]
        return zip(shares, self._completions(shares, np.flatnonzero(np.isin(self.share, numbers))), strict=True)

    def completions(self) -> Iterator[list[Completion]]:
        """Yield the completions of each share, in order.

        Rows that still grow have the finish reason ``abort``.
        """
        return self._completions(self._shares, self.all)

    def _completions(self, shares: Sequence[Share], picked: np.ndarray) -> Iterator[list[Completion]]:
        """Yield the completions of ``shares``, whose rows are ``picked``."""
        columns = (self._tokens, self._logprobs, self._length, self._reason, self._last_version)
        rows = zip(picked.tolist(), *(column[picked].tolist() for column in columns), strict=True)
        for share in shares:
            yield [
                Completion(
                    token_ids=tuple(tokens[:length]),
                    logprobs=tuple(logprobs[:length]),
                    finish_reason=_REASONS[reason],
                    versions=VersionSpan(self._first_version, last_version),
                    routed=self.routed(row, length),
                )
                for row, tokens, logprobs, length, reason, last_version in islice(rows, share.count)
            ]

    def _ends_with_stop(self, row: int) -> bool:
        """Return True if the newest token completed a stop string."""
        assert self._decode is not None
        params = self._shares[self.share[row]].request.params
        stop = params.stop
        # Earlier tokens completed no stop string, so checking the end is enough: a character has at most 4 byte
        # tokens; a few more allow for special tokens that decode to nothing.
        window = 4 * max(map(len, stop)) + 16
        length = int(self._length[row])
        if length <= params.min_tokens:
            return False
        start = max(0, length - window)
        text = self._decode(self._tokens[row, start:length].tolist())
        # A stop string completed before min_tokens does not count later either.
        early = self._tokens[row, start : max(start, params.min_tokens)].tolist()
        before = self._decode(early) if early else ""
        return any(text.count(string) > before.count(string) for string in stop)


def branch(
    node: np.ndarray, tokens: np.ndarray, *, width: int, vocab_size: int, filler: int
) -> tuple[np.ndarray | None, np.ndarray, np.ndarray]:
    """Return how the decoder's rows change when sequences diverge or end.

    Sequences on one decoder row that took the same token stay together; one that took another token needs its own row.

    Args:
        node: [R], the decoder row of each growing sequence.
        tokens: [R], the token that each sequence took.
        width: number of decoder rows, including those without growing sequences.
        vocab_size: a number above any token id.
        filler: the token to feed to rows without growing sequences.

    Returns:
        ``parents`` [M], the old row of each new row, or ``None`` to leave the rows as they are; ``inputs``
        [M] (or [width]), the token to feed to each row; ``node`` [R] in the new rows.
    """
    keys, index = np.unique(node * vocab_size + tokens, return_inverse=True)
    parents, inputs = keys // vocab_size, keys % vocab_size
    parted = bool((parents[1:] == parents[:-1]).any())
    if parted or width - keys.size >= _DROP_SHARE * width:
        return parents, inputs, index
    fed = np.full(width, filler)
    fed[parents] = inputs
    return None, fed, node


def _rectangle(sets: Sequence[Sequence[int]]) -> np.ndarray:
    """Return token sets as one array, padded with -1, which is not a token."""
    width = max(1, max(map(len, sets)))
    return np.array([[*tokens, *[-1] * (width - len(tokens))] for tokens in sets])
