"""Products of environments: sampled tokens, trajectories, and scored groups that a trainer can use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from pydantic import ConfigDict, model_validator

from lachesis.common.errors import DataError
from lachesis.common.types import UNKNOWN_VERSIONS, Completion, FinishReason, Message, VersionSpan
from lachesis.plugins.atropos.api.scored_group import NO_LOGPROB, UNTRAINED, ScoredGroup, why_not_finite, why_unusable


@dataclass(slots=True)
class Trajectory:
    """Growing sequence: the given tokens, and the tokens that the model sampled, in order.

    ``masks`` [T] has the token where it trains and -100 elsewhere; ``logprobs`` [T] has 1.0 elsewhere, as a mark.
    Nothing is ever tokenized again.
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

    def sample(self, sampled: Completion) -> None:
        """Append a completion, which trains."""
        self.tokens += sampled.token_ids
        self.masks += sampled.token_ids
        self.logprobs += sampled.logprobs
        self.finish_reason = sampled.finish_reason
        if sampled.versions != UNKNOWN_VERSIONS:
            first = self.versions.first if self.versions else sampled.versions.first
            self.versions = VersionSpan(first, sampled.versions.last)

    @property
    def sampled_length(self) -> int:
        """Number of tokens that train."""
        return sum(mask != UNTRAINED for mask in self.masks)

    def overrides(self) -> dict[str, Any]:
        """Return values that the protocol has no field for; trainers that do not know these keys ignore them."""
        known: dict[str, Any] = {"finish_reason": self.finish_reason}
        return known if self.versions is None else known | {"weight_version": self.versions._asdict()}


class UsableGroup(ScoredGroup):
    """Scored group as an environment makes it; its sampled tokens must have logprobs.

    Raises:
        DataError: no trainer could use it: lists of different lengths, a number that is not finite, a logprob above
            0 or a mask that is not the token where it trains, or a sequence of which nothing trains.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=True)

    @model_validator(mode="after")
    def _is_usable(self) -> Self:
        fault = why_unusable(self) or why_not_finite(self) or _fault(self)
        if fault:
            raise DataError(f"no trainer could use this scored group: {fault}", remedy="correct the environment")
        return self

    def document(self, *, env_id: int | None = None) -> dict[str, Any]:
        """Return the group in the protocol's JSON."""
        return self.model_dump() | {"env_id": env_id}

    @property
    def size(self) -> int:
        """Number of the group's sequences."""
        return len(self.tokens)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sequence."""
        return max(map(len, self.tokens))

    @property
    def trained(self) -> int:
        """Number of tokens that train, of all sequences."""
        return sum(mask != UNTRAINED for row in self.masks for mask in row)


def scored_group(
    trajectories: Sequence[Trajectory],
    scores: Sequence[float],
    *,
    temperature: float,
    include_messages: bool = False,
    group_overrides: Mapping[str, Any] | None = None,
) -> UsableGroup:
    """Make a group of trajectories and a score for each.

    Raises:
        DataError: no trainer could use it.
    """
    return UsableGroup(
        tokens=[trajectory.tokens for trajectory in trajectories],
        masks=[trajectory.masks for trajectory in trajectories],
        scores=list(scores),
        inference_logprobs=[trajectory.logprobs for trajectory in trajectories],
        messages=[list(map(dict, one.messages)) for one in trajectories] if include_messages else None,
        generation_params={"temperature": temperature},
        overrides=[trajectory.overrides() for trajectory in trajectories],
        group_overrides=None if group_overrides is None else dict(group_overrides),
    )


def _fault(group: UsableGroup) -> str:
    logprobs_of = group.inference_logprobs or ()
    if len(logprobs_of) != len(group.tokens):
        return f"inference_logprobs has {len(logprobs_of)} entries, tokens has {len(group.tokens)}"
    rows = zip(group.tokens, group.masks, logprobs_of, strict=True)
    for index, (tokens, masks, logprobs) in enumerate(rows):
        trains = 0
        for at, (token, mask, logprob) in enumerate(zip(tokens, masks, logprobs, strict=True)):
            if mask == UNTRAINED:
                continue
            trains += 1
            if mask != token:
                return f"masks[{index}][{at}] is {mask}, neither -100 nor the token {token}"
            if not -math.inf < logprob <= 0.0:
                return f"inference_logprobs[{index}][{at}] is {logprob}, which is not a logprob, where the mask trains"
        if not trains:
            return f"masks[{index}] trains no token"
    return ""
