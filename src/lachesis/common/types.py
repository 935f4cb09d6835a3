"""Records that cross the boundaries between rooms. Immutable; no torch."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    from lachesis.common.prompt_images import PromptImages
    from lachesis.common.routed_experts import RoutedExperts
    from lachesis.common.teacher_logprobs import TeacherLogprobs

FinishReason = Literal["stop", "length", "abort"]
Message = Mapping[str, Any]
Level = Literal["note", "warning", "problem"]
LEVELS: tuple[Level, ...] = get_args(Level)

# Limits of float32: e^-80 is nearly its smallest probability, and the squares of numbers above the largest, which norms
# and deviations need, nearly overflow. Every way into the system sets larger numbers aside.
LOWEST_LOGPROB = -80.0
LARGEST_NUMBER = 1e15


class VersionSpan(NamedTuple):
    """The weight versions under which the first and the last token of a sequence were sampled; -1 if unknown."""

    first: int
    last: int


UNKNOWN_VERSIONS = VersionSpan(-1, -1)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Dataset row, ready to be sampled from.

    ``columns`` holds every column that reward functions may use. ``messages`` is set if the row was a
    conversation; ``text`` is always the rendered prompt. ``source`` names one of several sources. With ``images``,
    ``token_ids`` has all their placeholders.
    """

    id: str
    token_ids: tuple[int, ...]
    text: str
    messages: tuple[Message, ...] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    images: PromptImages | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters with vLLM's names and meanings; ``top_k=0``, ``top_p=1`` and ``min_p=0`` cut nothing.

    ``routed_experts`` requests the experts that a mixture used. ``extra`` holds further fields of vLLM's
    sampling parameters, which only its servers understand.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    guided_regex: str | None = None
    routed_experts: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def greedy(self) -> bool:
        """Return True at temperature 0, which takes the likeliest token; logprobs are then those of temperature 1."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for ``n`` completions of one prompt; equal seeds give equal completions, whatever else is in the batch.

    If several engines serve, requests of one ``conversation`` go to the same engine, which has their prefix cached;
    without a name, requests of one prompt do.
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    n: int = 1
    seed: int = 0
    conversation: str = ""
    images: PromptImages | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """Sequence that an engine returned.

    ``logprobs[i]`` is that of ``token_ids[i]`` under the distribution it was sampled from: after
    temperature, penalties and truncation. ``routed`` has the experts of prompt and completion if the request asked
    for them.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    versions: VersionSpan
    routed: RoutedExperts | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """Completion in a group, with all data that training needs.

    ``logprobs`` are behaviour logprobs, NaN where unknown. ``mask`` is 1 for tokens that the model sampled
    and 0 for others (tool output). ``rewards`` has a value per reward function, ``None`` if it abstained.
    ``token_advantages`` has a value per completion token that is added to ``advantage``; ``None`` adds nothing.
    ``teacher`` holds logprobs of a teacher outside the trainer, ``teacher_prompt_ids`` the prompt that the policy's own
    teacher reads instead of ``prompt_ids``, ``routed`` the experts that the engine used, ``images`` those of tools'
    answers among the completion, a record for each answer.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    versions: VersionSpan
    text: str = ""
    mask: tuple[int, ...] | None = None
    temperature: float = 1.0
    rewards: tuple[float | None, ...] = ()
    reward: float | None = None
    advantage: float | None = None
    token_advantages: tuple[float, ...] | None = None
    teacher: TeacherLogprobs | None = None
    teacher_prompt_ids: tuple[int, ...] | None = None
    routed: RoutedExperts | None = None
    images: tuple[PromptImages, ...] = ()

    def loss_mask(self) -> tuple[int, ...]:
        """Return 1 for each completion token that counts in the loss, else 0; same length as ``completion_ids``."""
        return self.mask if self.mask is not None else (1,) * len(self.completion_ids)

    @property
    def num_learned(self) -> int:
        """Return the number of completion tokens that count in the loss."""
        return len(self.completion_ids) if self.mask is None else sum(self.mask)


@dataclass(frozen=True, slots=True)
class Group:
    """Group of all completions of a prompt: the unit that rewards, advantages and filters work on.

    A group from the replay buffer, which was trained on before, has in ``replaces`` the group without signal whose
    place in the batch it takes: only the latter, generated for this step, shows how good the policy is. ``logged`` has,
    for each name that a reward function gave to ``log_extra``, a value per sample.
    """

    prompt: Prompt
    samples: tuple[Sample, ...]
    replaces: Group | None = None
    logged: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    @property
    def replayed(self) -> bool:
        """Return True if the group comes from the replay buffer."""
        return self.replaces is not None

    @property
    def generated(self) -> Group:
        """Return the group that was generated for this place in the batch."""
        return self if self.replaces is None else self.replaces

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """Return the total reward of each sample."""
        return tuple(sample.reward for sample in self.samples)

    def without(self, places: Collection[int]) -> Group:
        """Return the group without the samples at these places and without their logged values."""
        kept = [place for place in range(len(self.samples)) if place not in places]
        logged = {name: [values[place] for place in kept] for name, values in self.logged.items()}
        return replace(self, samples=tuple(self.samples[place] for place in kept), logged=logged)

    def scored(self, rewards: Sequence[float | None]) -> Group:
        """Return the group with a reward for each sample, in order; raise ValueError if the lengths differ."""
        samples = tuple(
            replace(sample, rewards=(reward,), reward=reward)
            for sample, reward in zip(self.samples, rewards, strict=True)
        )
        return replace(self, samples=samples)


@dataclass(frozen=True, slots=True)
class CanaryReading:
    """The logprobs of a fixed token sequence under an engine's (or the trainer's) current weights.

    ``logprobs[i]`` is that of token ``i + 1`` given the tokens before it, at temperature 1. ``cached_tokens`` counts
    the tokens from the engine's prefix cache in a probe with which no prompt begins.
    """

    logprobs: tuple[float, ...]
    version: int
    session_id: str
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """A snapshot of an engine: its readiness and its weights.

    ``others_serve`` is True if one of several servers is unhealthy, but another one serves.
    """

    ready: bool
    version: int
    session_id: str
    paused: bool = False
    detail: str = ""
    others_serve: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """Sentence of the health rules about a fault and its remedy.

    ``resolved`` is the step at which an earlier finding ended; its message is unchanged.
    """

    level: Level
    rule: str
    message: str
    resolved: int | None = None

    @property
    def line(self) -> str:
        """Return the finding as a line for people."""
        if self.resolved is None:
            return f"{self.level}: {self.message}"
        return f"resolved at step {self.resolved}: {self.message}"


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The result of a greedy (or sampled) evaluation on held-out problems.

    ``accuracy`` is the share of successes among all ``samples`` of all ``problems`` (avg@k), ``pass_at_k`` the
    share of problems with at least one success; None with one sample, for which both are equal. ``benchmarks`` has the
    figures of each named benchmark, ``by_source`` accuracy, mean reward and number of problems of each of several
    sources.
    """

    step: int
    accuracy: float
    mean_reward: float
    problems: int
    mean_length: float
    seconds: float
    samples: int = 1
    pass_at_k: float | None = None
    benchmarks: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    by_source: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Data that sinks get for one finished optimizer step.

    ``values`` are reduced over all ranks. ``ended`` is the end of the step in seconds since the epoch: sinks get it
    later.
    """

    step: int
    values: Mapping[str, float]
    groups: Sequence[Group] = ()
    evaluation: EvalResult | None = None
    findings: Sequence[Finding] = ()
    ended: float = field(default_factory=time.time)
