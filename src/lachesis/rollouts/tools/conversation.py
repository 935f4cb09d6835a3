"""Rollout of several turns, token by token: the model's sampled tokens, and the tokens inserted in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lachesis.common.prompt_images import PromptImages
from lachesis.common.routed_experts import RoutedExperts, joined_routes
from lachesis.common.types import UNKNOWN_VERSIONS, Completion, FinishReason, Message, Sample, VersionSpan


@dataclass(slots=True)
class Conversation:
    """A growing rollout. ``mask`` is 1 for tokens of the model; other tokens have logprob 0.

    ``name`` names the conversation for the engine; rollouts of one prompt share it, because they begin alike.
    ``last_turn`` has the tokens sampled last, ``images`` those of the answers, a record for each.
    """

    prompt_ids: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    mask: list[int] = field(default_factory=list[int])
    messages: list[Message] = field(default_factory=list[Message])
    finish_reason: FinishReason = "stop"
    versions: VersionSpan = UNKNOWN_VERSIONS
    turns: int = 0
    calls: int = 0
    name: str = ""
    last_turn: tuple[int, ...] = ()
    routes: list[RoutedExperts | None] = field(default_factory=list["RoutedExperts | None"])
    images: list[PromptImages] = field(default_factory=list[PromptImages])

    @property
    def next_prompt(self) -> tuple[int, ...]:
        """Return the tokens so far, after which the next turn is sampled."""
        return (*self.prompt_ids, *self.token_ids)

    def sample(self, completion: Completion) -> None:
        """Add a turn of the model, exactly as it was sampled."""
        if self.turns == 0:
            self.versions = completion.versions
        elif self.versions.last != completion.versions.last:
            self.versions = VersionSpan(self.versions.first, completion.versions.last)
        self.last_turn = completion.token_ids
        self.routes.append(completion.routed)
        self.token_ids += completion.token_ids
        self.logprobs += completion.logprobs
        self.mask += [1] * len(completion.token_ids)
        self.finish_reason = completion.finish_reason
        self.turns += 1

    def give(self, token_ids: Sequence[int], images: PromptImages | None = None) -> None:
        """Add tokens that the model did not sample, with the images among them."""
        if images is not None:
            self.images.append(replace(images, first=len(self.next_prompt)))
        self.token_ids += token_ids
        self.logprobs += [0.0] * len(token_ids)
        self.mask += [0] * len(token_ids)

    def as_sample(self, *, text: str, temperature: float) -> Sample:
        """Return the whole conversation as one completion."""
        routed = joined_routes(self.routes)
        return Sample(
            prompt_ids=self.prompt_ids,
            completion_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason,
            versions=self.versions,
            text=text,
            mask=None if all(self.mask) else tuple(self.mask),
            temperature=temperature,
            routed=routed,
            images=tuple(self.images),
        )
