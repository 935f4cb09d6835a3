"""What sampling has to know of the tokens that a row has already: penalties, least lengths, regular expressions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from lachesis.engines.embedded.guided import RegexGuide
from lachesis.engines.embedded.rows import Share
from lachesis.engines.embedded.sampling import RowSampling


class Histories:
    """N rows of a decoder, one for each share at first. Empty where no row's sampling depends on its tokens.

    Args:
        shares: what is decoded.
        sampling: of the same rows.
        logits: [N, V], for shape and device.
        end_token_ids: tokens that end every sequence.
        guide: makes the guide of a regular expression.
        pieces: makes the texts of all tokens, [V].

    Attributes:
        seen: bool [N, V], tokens of prompt and completion; ``None`` without repetition penalty.
        counts: float [N, V], how often each token is in the completion; ``None`` without penalties on it.
    """

    def __init__(
        self,
        shares: Sequence[Share],
        *,
        sampling: RowSampling,
        logits: Tensor,
        end_token_ids: Sequence[int],
        guide: Callable[[str], RegexGuide],
        pieces: Callable[[], Sequence[str]],
    ) -> None:
        params = [share.request.params for share in shares]
        self.seen = _seen_tokens(shares, logits) if sampling.repetition_penalty is not None else None
        counts = sampling.presence_penalty is not None or sampling.frequency_penalty is not None
        self.counts = torch.zeros(logits.shape, device=logits.device) if counts else None
        self._logits = logits
        self._least = [p.min_tokens for p in params]
        self._ends = [[*end_token_ids, *p.stop_token_ids] for p in params]
        self._guides = [None if p.guided_regex is None else guide(p.guided_regex) for p in params]
        self._pieces = pieces() if any(one is not None for one in self._guides) else []
        self._texts = [""] * len(shares)
        self._share = np.arange(len(shares))

    def banned(self, nodes: np.ndarray, *, length: int) -> Tensor | None:
        """Tokens that may not come next in the rows ``nodes``, which have ``length`` tokens. Bool [N, V] or ``None``.

        Raises:
            EngineError: a regular expression that no token goes on with.
        """
        rows = [(int(row), int(self._share[row])) for row in np.unique(nodes)]
        rows = [(row, share) for row, share in rows if self._guides[share] is not None or length < self._least[share]]
        if not rows:
            return None
        banned = np.zeros((len(self._share), self._logits.shape[1]), dtype=bool)
        for row, share in rows:
            if (guide := self._guides[share]) is not None:
                banned[row] = ~guide.allowed(self._texts[row])
            if length < self._least[share] and not banned[row].all():
                ended = banned[row].copy()
                ended[self._ends[share]] = True
                # A text that can only end ends.
                banned[row] = banned[row] if ended.all() else ended
        return torch.from_numpy(banned).to(self._logits.device)

    def fork(self, parents: np.ndarray, picked: Tensor) -> None:
        """The rows are now copies of the old rows ``parents`` [M]; ``picked`` is the same on the device."""
        self._share = self._share[parents]
        self._texts = [self._texts[parent] for parent in parents.tolist()]
        self.seen = None if self.seen is None else self.seen.index_select(0, picked)
        self.counts = None if self.counts is None else self.counts.index_select(0, picked)

    def append(self, tokens: np.ndarray, fed: Tensor) -> None:
        """Each row got a token more, ``tokens`` [N]; ``fed`` is the same on the device."""
        if self._pieces:
            self._texts = [
                text + self._pieces[int(token)] for text, token in zip(self._texts, tokens.tolist(), strict=True)
            ]
        if self.seen is not None:
            self.seen.scatter_(1, fed[:, None], True)
        if self.counts is not None:
            self.counts.scatter_add_(1, fed[:, None], torch.ones_like(fed[:, None], dtype=self.counts.dtype))


def _seen_tokens(shares: Sequence[Share], logits: Tensor) -> Tensor:
    """bool [N, V] on the device of ``logits`` [N, V]: which tokens each prompt has."""
    seen = torch.zeros(logits.shape, dtype=torch.bool)
    for row, share in zip(seen, shares, strict=True):
        row[list(share.request.prompt_ids)] = True
    return seen.to(logits.device)
