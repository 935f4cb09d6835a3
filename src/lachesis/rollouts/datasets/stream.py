"""The order in which training meets problems, and the part of them that is held out."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from lachesis.common.errors import CheckpointError, ConfigError, DataError
from lachesis.common.types import Group, Prompt
from lachesis.rollouts.datasets.curriculum import PassRates

# Separator in the id of a prompt, before the number of the turn within the row.
FOLLOW_UP = "+"


def split_eval(problems: Sequence[Prompt], eval_size: float, *, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Hold out some problems, drawn at random by ``seed``: (training, held out), both in file order.

    A row's follow-up question stays with the row, since its conversation holds the row's answer.

    Args:
        problems: all of them.
        eval_size: a number of rows, or a share below 1, which gives at least one row.
        seed: of the draw.

    Raises:
        ConfigError: the size is neither a whole number nor a share.
        DataError: nothing would be left to train on.
    """
    rows: dict[str, list[int]] = {}
    for index, problem in enumerate(problems):
        rows.setdefault(problem.id.partition(FOLLOW_UP)[0], []).append(index)
    count = max(1, round(eval_size * len(rows))) if 0 < eval_size < 1 else int(eval_size)
    if eval_size < 0 or (eval_size >= 1 and count != eval_size):
        raise ConfigError(f"data.eval_size cannot be {eval_size}", remedy="give a whole number, or a share below 1")
    if count >= len(rows):
        raise DataError(
            f"data.eval_size is {eval_size}, but there are only {len(rows)} problems",
            remedy="hold out fewer problems, or name a separate file in data.eval_path",
        )
    import numpy as np  # not at the top, because `lachesis plan` does not need it

    members = list(rows.values())
    drawn = np.random.default_rng(seed).permutation(len(rows))[len(rows) - count :].tolist()
    held_out = {index for row in drawn for index in members[row]}
    training = [problem for index, problem in enumerate(problems) if index not in held_out]
    return training, [problems[index] for index in sorted(held_out)]


class PromptStream:
    """An endless stream of prompts, epoch after epoch, whose place can be saved and found again exactly.

    The order of an epoch depends on the seed, the number of the epoch and the ranks only.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        shuffle: bool = True,
        ranks: Sequence[float] | None = None,
        rates: PassRates | None = None,
    ) -> None:
        """Initialize the stream at its start.

        Args:
            prompts: all of them.
            seed: of the shuffles.
            shuffle: each epoch.
            ranks: one per prompt; lower ranks come first in an epoch, in the usual order among equals.
            rates: decide which problems of an epoch are sampled; all are, if unset.

        Raises:
            DataError: there are no prompts, or two have one id.
        """
        self._by_id = {prompt.id: prompt for prompt in prompts}
        if not prompts or len(self._by_id) != len(prompts):
            problem = "two prompts have the same id" if prompts else "there are no prompts to train on"
            raise DataError(problem, remedy="check the dataset")
        self._prompts = tuple(prompts)
        self._seed = seed
        self._shuffle = shuffle
        self._ranks = ranks
        self._rates = rates
        self.skipped = 0
        self._front: deque[Prompt] = deque()
        self._enter(epoch=0, index=0)

    def __len__(self) -> int:
        """Return the number of prompts in one epoch."""
        return len(self._prompts)

    @property
    def epoch(self) -> int:
        """Return the epoch of the last prompt, counted from 0."""
        return self._epoch

    @property
    def columns(self) -> frozenset[str]:
        """Return the names of all columns of the prompts."""
        return frozenset(name for prompt in self._prompts for name in prompt.columns)

    def take(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts: first those put back, then the epoch's."""
        taken = [self._front.popleft() for _ in range(min(count, len(self._front)))]
        while len(taken) < count:
            if self._index == len(self._prompts):
                self._enter(epoch=self._epoch + 1, index=0)
            prompt = self._prompts[self._order[self._index]]
            self._index += 1
            if self._rates is None or self._rates.wants(prompt.id, epoch=self._epoch):
                taken.append(prompt)
            else:
                self.skipped += 1
        return taken

    @property
    def adapts(self) -> bool:
        """Return True if sampling depends on pass rates."""
        return self._rates is not None

    def note(self, group: Group) -> None:
        """Take the rewards of a prompt's group into its pass rate."""
        if self._rates is not None:
            rewards = [sample.reward for sample in group.samples if sample.reward is not None]
            self._rates.note(group.prompt.id, rewards)

    def own(self, prompt: Prompt) -> Prompt:
        """Return this stream's prompt of that id, with the dataset's columns; ``prompt`` itself if it has none."""
        return self._by_id.get(prompt.id, prompt)

    def put_back(self, prompts: Sequence[Prompt]) -> None:
        """Make ``prompts`` the next ones, in their order.

        Raises:
            DataError: a prompt is not of this stream.
        """
        if unknown := [prompt.id for prompt in prompts if prompt.id not in self._by_id]:
            raise DataError(f"prompt {unknown[0]!r} is not in this dataset")
        self._front.extendleft(reversed([self._by_id[prompt.id] for prompt in prompts]))

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the stream, and a fingerprint of its dataset."""
        return {
            "epoch": self._epoch,
            "index": self._index,
            "front": [prompt.id for prompt in self._front],
            "dataset": self._fingerprint,
            **({} if self._rates is None else {"rates": self._rates.state_dict()}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved place.

        Raises:
            CheckpointError: the place is in another dataset.
        """
        if state.get("dataset") != self._fingerprint:
            raise CheckpointError(
                "the dataset differs from the checkpoint's in its prompts, their order, or the chat template",
                remedy="resume with the dataset that the run started with, or start a new run",
            )
        self._enter(epoch=int(state["epoch"]), index=int(state["index"]))
        self._front = deque(self._by_id[prompt_id] for prompt_id in state["front"])
        if self._rates is not None:
            self._rates.load_state_dict(state.get("rates", {}))

    def _enter(self, *, epoch: int, index: int) -> None:
        import numpy as np

        order = np.arange(len(self._prompts))
        if self._shuffle:
            order = np.random.default_rng((self._seed, epoch)).permutation(order)
        if self._ranks is not None:
            order = order[np.argsort(np.asarray(self._ranks, dtype=np.float64)[order], kind="stable")]
        self._epoch, self._index, self._order = epoch, index, order.tolist()

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        for prompt in self._prompts:
            digest.update(f"{prompt.id}\0{prompt.text}\0".encode("utf-8", "surrogatepass"))
        return digest.hexdigest()[:16]
