"""What environments make: sampled tokens, trajectories, and scored groups that a trainer can use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from lachesis.api.checks import NO_LOGPROB, UNTRAINED, why_unusable
from lachesis.common.errors import DataError
from lachesis.common.types import FinishReason, Message, VersionSpan


@dataclass(frozen=True, slots=True)
class Sampled:
    """One completion as a server sampled it.

    ``logprobs[i]`` is that of ``token_ids[i]``. ``versions`` are the weight versions at its first and last token;
    ``None`` where the server knows none.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    versions: VersionSpan | None = None


@dataclass(slots=True)
class Trajectory:
    """One sequence in the making: what was given, and what the model sampled, token by token as it came.

    ``masks`` [T] has the token where it trains and -100 elsewhere; ``logprobs`` [T] has 1.0 elsewhere, which is no
    logprob. Nothing is ever tokenized again.
    """

    tokens: list[int] = field(default_factory=list)
    masks: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    finish_reason: FinishReason = "stop"
    versions: VersionSpan | None = None

    def give(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the model did not sample: a prompt, the output of a tool."""
        self.tokens += token_ids
        self.masks += [UNTRAINED] * len(token_ids)
        self.logprobs += [NO_LOGPROB] * len(token_ids)

    def sample(self, sampled: Sampled) -> None:
        """Append a completion, which trains."""
        self.tokens += sampled.token_ids
        self.masks += sampled.token_ids
        self.logprobs += sampled.logprobs
        self.finish_reason = sampled.finish_reason
        if sampled.versions is not None:
            first = self.versions.first if self.versions else sampled.versions.first
            self.versions = VersionSpan(first, sampled.versions.last)

    @property
    def sampled_length(self) -> int:
        """Tokens that train."""
        return sum(mask != UNTRAINED for mask in self.masks)

    def overrides(self) -> dict[str, Any]:
        """What the protocol has no field for; trainers that do not know these keys ignore them."""
        known: dict[str, Any] = {"finish_reason": self.finish_reason}
        return known if self.versions is None else known | {"weight_version": self.versions._asdict()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """All sequences of one problem with their scores, in the shape of the protocol; lists are of [sequence][position].

    ``overrides`` has a mapping per sequence, ``group_overrides`` one for all. Optional lists may be ``None``.

    Raises:
        DataError: no trainer could use it: lists of different lengths, a number that is not finite, a logprob above
            0 or a mask that is not the token where it trains, or a sequence of which nothing trains.
    """

    tokens: Sequence[Sequence[int]]
    masks: Sequence[Sequence[int]]
    scores: Sequence[float]
    inference_logprobs: Sequence[Sequence[float]]
    advantages: Sequence[Sequence[float]] | None = None
    ref_logprobs: Sequence[Sequence[float]] | None = None
    messages: Sequence[Sequence[Message]] | None = None
    generation_params: Mapping[str, Any] | None = None
    overrides: Sequence[Mapping[str, Any]] | None = None
    group_overrides: Mapping[str, Any] | None = None
    images: Any = None
    distill_token_ids: Sequence[Sequence[Sequence[int]]] | None = None
    distill_logprobs: Sequence[Sequence[Sequence[float]]] | None = None

    def __post_init__(self) -> None:
        fault = why_unusable(self) or _fault(self)  # type: ignore[arg-type]
        if fault:
            raise DataError(f"a scored group that no trainer could use: {fault}", remedy="correct the environment")

    def document(self, *, env_id: int | None = None) -> dict[str, Any]:
        """The group as it goes over the wire."""
        document = {one.name: getattr(self, one.name) for one in fields(self)}
        return document | {"env_id": env_id}

    @property
    def size(self) -> int:
        """How many sequences it has."""
        return len(self.tokens)

    @property
    def longest(self) -> int:
        """Tokens of its longest sequence."""
        return max(map(len, self.tokens))

    @property
    def trained(self) -> int:
        """Tokens that train, of all sequences."""
        return sum(mask != UNTRAINED for row in self.masks for mask in row)


def scored_group(
    trajectories: Sequence[Trajectory],
    scores: Sequence[float],
    *,
    temperature: float,
    include_messages: bool = False,
    group_overrides: Mapping[str, Any] | None = None,
) -> ScoredGroup:
    """A group out of trajectories and a score for each.

    Raises:
        DataError: it is one that no trainer could use.
    """
    return ScoredGroup(
        tokens=[trajectory.tokens for trajectory in trajectories],
        masks=[trajectory.masks for trajectory in trajectories],
        scores=list(scores),
        inference_logprobs=[trajectory.logprobs for trajectory in trajectories],
        messages=[trajectory.messages for trajectory in trajectories] if include_messages else None,
        generation_params={"temperature": temperature},
        overrides=[trajectory.overrides() for trajectory in trajectories],
        group_overrides=group_overrides,
    )


def _fault(group: ScoredGroup) -> str:
    if len(group.inference_logprobs) != len(group.tokens):
        return f"inference_logprobs has {len(group.inference_logprobs)} entries, tokens has {len(group.tokens)}"
    for index, score in enumerate(group.scores):
        if not math.isfinite(score):
            return f"scores[{index}] is {score}"
    rows = zip(group.tokens, group.masks, group.inference_logprobs, strict=True)
    for index, (tokens, masks, logprobs) in enumerate(rows):
        trains = 0
        for at, (token, mask, logprob) in enumerate(zip(tokens, masks, logprobs, strict=True)):
            if mask == UNTRAINED:
                continue
            trains += 1
            if mask != token:
                return f"masks[{index}][{at}] is {mask}, neither -100 nor the token {token}"
            if not -math.inf < logprob <= 0.0:
                return f"inference_logprobs[{index}][{at}] is {logprob}, which is no logprob, where the mask trains"
        if not trains:
            return f"masks[{index}] trains no token"
    return ""
