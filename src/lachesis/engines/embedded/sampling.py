"""Sampling of tokens with exact logprobs from logits: pure functions over rows.

Shapes: N distributions over a vocabulary of V tokens. Order and meaning of the processors are vLLM's: forbidden tokens,
penalties for repetition, frequency and presence, temperature, min-p, top-k, top-p. Everything is computed in float32,
whatever the model's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from lachesis.common.types import SamplingParams
from lachesis.engines.embedded.rows import Share

_NO_TOP_P = 2.0  # above any sum of probabilities, rounding included


@dataclass(frozen=True, slots=True)
class RowSampling:
    """The sampling parameters of N rows, each [N, 1] on the model's device; ``None`` if no row uses it.

    A greedy row has temperature 1 and truncates nothing, so that its logprob is the model's own. ``greedy`` is a bool
    [N]; ``max_top_k`` is the largest of ``top_k``, known without asking the device.
    """

    greedy: Tensor | None
    all_greedy: bool
    repetition_penalty: Tensor | None
    frequency_penalty: Tensor | None
    presence_penalty: Tensor | None
    temperature: Tensor | None
    min_p: Tensor | None
    top_k: Tensor | None
    max_top_k: int
    top_p: Tensor | None

    @classmethod
    def of(cls, params: Sequence[SamplingParams], *, vocab_size: int, device: torch.device | str) -> RowSampling:
        """Collect sampling parameters as tensors: row i samples with ``params[i]``."""

        def column(values: list[float] | list[int], *, unused: float) -> Tensor | None:
            dtype = torch.float32 if isinstance(unused, float) else torch.int64
            used = any(value != unused for value in values)
            return torch.tensor(values, dtype=dtype, device=device)[:, None] if used else None

        greedy = [p.greedy for p in params]
        top_k = [min(p.top_k, vocab_size) if p.top_k > 0 and not p.greedy else vocab_size for p in params]
        return cls(
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            all_greedy=all(greedy),
            repetition_penalty=column([p.repetition_penalty for p in params], unused=1.0),
            frequency_penalty=column([p.frequency_penalty for p in params], unused=0.0),
            presence_penalty=column([p.presence_penalty for p in params], unused=0.0),
            temperature=column([1.0 if p.greedy else p.temperature for p in params], unused=1.0),
            min_p=column([0.0 if p.greedy else p.min_p for p in params], unused=0.0),
            top_k=column(top_k, unused=vocab_size),
            max_top_k=max(top_k, default=vocab_size),
            top_p=column([_NO_TOP_P if p.greedy or p.top_p >= 1 else p.top_p for p in params], unused=_NO_TOP_P),
        )

    def take(self, rows: Tensor) -> RowSampling:
        """Return the parameters of other rows: ``rows`` [M] are indices into these N."""

        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        picked = {name: values.index_select(0, rows) for name, values in columns.items() if torch.is_tensor(values)}
        return replace(self, **picked)


def process_logits(
    logits: Tensor,
    sampling: RowSampling,
    *,
    seen: Tensor | None = None,
    counts: Tensor | None = None,
    banned: Tensor | None = None,
) -> Tensor:
    """Return logprobs [N, V] (float32) of the distributions to sample from; -inf for removed tokens.

    Args:
        logits: [N, V] of any float dtype.
        sampling: the parameters of the N rows.
        seen: bool [N, V], true for tokens of the prompt and of the completion so far; needed for a repetition penalty.
        counts: float [N, V], how often each token is in the completion so far; needed for a frequency or presence
            penalty.
        banned: bool [N, V], tokens that must not be sampled.
    """
    logits = logits.float()
    if banned is not None:
        logits = logits.masked_fill(banned, float("-inf"))
    if sampling.repetition_penalty is not None and seen is not None:
        logits = penalize_repetition(logits, sampling.repetition_penalty, seen)
    if sampling.frequency_penalty is not None and counts is not None:
        logits = logits - sampling.frequency_penalty * counts
    if sampling.presence_penalty is not None and counts is not None:
        logits = logits - sampling.presence_penalty * (counts > 0)
    if sampling.temperature is not None:
        logits = logits / sampling.temperature
    if sampling.min_p is not None:
        logits = cut_min_p(logits, sampling.min_p)
    if sampling.top_k is not None:
        logits = cut_top_k(logits, sampling.top_k, max_top_k=sampling.max_top_k)
    if sampling.top_p is not None:
        logits = cut_top_p(logits, sampling.top_p)
    return logits.log_softmax(-1)


def penalize_repetition(logits: Tensor, penalty: Tensor, seen: Tensor) -> Tensor:
    """Divide positive logits [N, V] of seen tokens by ``penalty`` [N, 1] and multiply negative ones (CTRL)."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def cut_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Remove tokens less likely than ``min_p`` [N, 1] times the likeliest."""
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + min_p.log(), float("-inf"))


def cut_top_k(logits: Tensor, top_k: Tensor, *, max_top_k: int) -> Tensor:
    """Keep the ``top_k`` [N, 1] likeliest tokens, and tokens tied with the last of them."""
    kth = logits.topk(max_top_k, dim=-1).values.gather(-1, top_k - 1)
    return logits.masked_fill(logits < kth, float("-inf"))


def cut_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Keep the smallest set of likeliest tokens whose probabilities sum to at least ``top_p`` [N, 1]."""
    ordered, index = logits.sort(dim=-1, descending=True, stable=True)
    probs = ordered.softmax(-1)
    # A token stays if the sum before it is below top_p, so the token that crosses top_p stays, and always the first.
    cut = probs.cumsum(-1) - probs >= top_p
    return logits.masked_fill(torch.zeros_like(cut).scatter(-1, index, cut), float("-inf"))


def sample(logprobs: Tensor, uniforms: Tensor | None, *, greedy: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sample a token and its logprob for each row, by inverting the cumulative distribution.

    Args:
        logprobs: [N, V], normalized; -inf for tokens that must not be sampled.
        uniforms: [N] in [0, 1); ``None`` takes the likeliest token in every row.
        greedy: bool [N], rows that take the likeliest token; ``None`` for none.

    Returns:
        token ids [N] (int64) and their logprobs [N].
    """
    tokens = logprobs.argmax(-1, keepdim=True)
    if uniforms is not None:
        probs = logprobs.exp()
        cdf = probs.cumsum(-1)
        drawn = torch.searchsorted(cdf, uniforms[:, None] * cdf[:, -1:], right=True)
        drawn.clamp_(max=logprobs.shape[-1] - 1)
        # Rounding at the end of the sum, or a parallel sum that is not monotone, can select a token of probability 0:
        # such a row takes its likeliest token.
        invert = probs.gather(-1, drawn) > 0
        if greedy is not None:
            invert &= ~greedy[:, None]
        tokens = torch.where(invert, drawn, tokens)
    return tokens.squeeze(-1), logprobs.gather(-1, tokens).squeeze(-1)


def draw_uniforms(keys: Sequence[tuple[int, int]], steps: int) -> np.ndarray:
    """Return random numbers [len(keys), steps] in [0, 1), float32; row i depends on ``keys[i]`` alone.

    A key is (seed of the request, index of the completion). It becomes the key of a Philox generator (Salmon et al.
    2011), which is counter-based, so that streams of different keys are independent.
    """
    philox = np.random.Philox(key=0)
    generator = np.random.Generator(philox)
    fresh = philox.state
    uniforms = np.empty((len(keys), steps), dtype=np.float32)
    for row, (seed, completion) in enumerate(keys):
        # Setting the state is several times cheaper than making a new generator.
        fresh["state"]["key"] = np.array([seed % 2**64, completion], dtype=np.uint64)
        philox.state = fresh
        generator.random(steps, dtype=np.float32, out=uniforms[row])
    return uniforms


class Histories:
    """Token histories of rows, needed for penalties and minimum lengths.

    There are N decoder rows, initially one for each share. Empty if no row's sampling depends on its tokens.

    Args:
        shares: shares of the batch.
        sampling: the sampling parameters of the same rows.
        logits: [N, V], used for shape and device.
        end_token_ids: tokens that end every sequence.

    Attributes:
        seen: bool [N, V], tokens of prompt and completion; ``None`` without repetition penalty.
        counts: float [N, V], how often each token is in the completion; ``None`` if no penalty needs it.
    """

    def __init__(
        self, shares: Sequence[Share], *, sampling: RowSampling, logits: Tensor, end_token_ids: Sequence[int]
    ) -> None:
        params = [share.request.params for share in shares]
        self.seen = _seen_tokens(shares, logits) if sampling.repetition_penalty is not None else None
        counts = sampling.presence_penalty is not None or sampling.frequency_penalty is not None
        self.counts = torch.zeros(logits.shape, device=logits.device) if counts else None
        self._logits = logits
        self._least = [p.min_tokens for p in params]
        self._ends = [[*end_token_ids, *p.stop_token_ids] for p in params]
        self._share = np.arange(len(shares))

    def banned(self, nodes: np.ndarray, *, length: int) -> Tensor | None:
        """Return the tokens forbidden next in rows ``nodes`` of ``length`` tokens: bool [N, V] or ``None``."""
        rows = [(int(row), int(self._share[row])) for row in np.unique(nodes)]
        early = [(row, share) for row, share in rows if length < self._least[share]]
        if not early:
            return None
        banned = torch.zeros((len(self._share), self._logits.shape[1]), dtype=torch.bool)
        for row, share in early:
            banned[row, self._ends[share]] = True
        return banned.to(self._logits.device)

    def fork(self, parents: np.ndarray, picked: Tensor) -> None:
        """Replace the rows by copies of the old rows ``parents`` [M]; ``picked`` is ``parents`` on the device."""
        self._share = self._share[parents]
        self.seen = None if self.seen is None else self.seen.index_select(0, picked)
        self.counts = None if self.counts is None else self.counts.index_select(0, picked)

    def append(self, fed: Tensor) -> None:
        """Append a token to each row: ``fed`` [N], on the device."""
        if self.seen is not None:
            self.seen.scatter_(1, fed[:, None], True)
        if self.counts is not None:
            self.counts.scatter_add_(1, fed[:, None], torch.ones_like(fed[:, None], dtype=self.counts.dtype))


def _seen_tokens(shares: Sequence[Share], logits: Tensor) -> Tensor:
    """Return the tokens in each prompt: bool [N, V] on the device of ``logits`` [N, V]."""
    seen = torch.zeros(logits.shape, dtype=torch.bool)
    for row, share in zip(seen, shares, strict=True):
        row[list(share.request.prompt_ids)] = True
    return seen.to(logits.device)
