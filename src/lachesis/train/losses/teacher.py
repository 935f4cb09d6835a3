"""Teachers beside the rewards: on-policy distillation (GKD, arXiv 2306.13649).

The teacher reads the policy's own samples, and weight · D(teacher, policy) is added to each token's loss, for a
divergence D of :mod:`lachesis.train.losses.divergence`. D is exact for the known part of the teacher's distribution, or
estimated from the sampled tokens alone; then it becomes part of their advantages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lachesis.common.errors import TrainingError
from lachesis.common.types import Group
from lachesis.config.schema import TeacherConfig
from lachesis.train.batch import MicroBatch, idle_micro_batch
from lachesis.train.losses.divergence import IMPOSSIBLE, divergence, sampled_reverse_kl, with_rest
from lachesis.train.losses.ratios import count_rows
from lachesis.train.losses.reference import Reference
from lachesis.train.model.context import ContextGroup
from lachesis.train.model.forward import (
    ForwardPlan,
    Packing,
    at_loss_tokens,
    distributions,
    plan_forward,
    target_logprobs,
)
from lachesis.train.model.head import Read, TokenLogprobs
from lachesis.train.packing import Shares

T = TypeVar("T")


class Candidates(NamedTuple):
    """Teacher's logprobs of candidates for M next tokens.

    Attributes:
        logprobs: float [M, K], of its whole distribution.
        ids: int64 [M, K], their tokens, -1 for none; ``None`` stands for tokens 0..K-1.
        whole: True if these are all tokens of its vocabulary.
    """

    logprobs: Tensor
    ids: Tensor | None
    whole: bool


class Lesson(NamedTuple):
    """Contribution of a teacher to a micro-batch's loss.

    Attributes:
        advantages: float [S] or [N], of the rewards, plus the teacher's if estimated.
        loss: float [N] with gradient, to be added to the loss of each token; ``None`` if it is in the advantages.
        metrics: pairs [2] of (weighted sum, weight).
    """

    advantages: Tensor
    loss: Tensor | None = None
    metrics: dict[str, Tensor] = {}  # noqa: RUF012  # of an empty lesson


@dataclass(kw_only=True, eq=False)
class Teacher(ABC):
    """Source of the teacher's logprobs. It never changes, so checkpoints do not contain it."""

    options: TeacherConfig

    @abstractmethod
    def candidates(self, micro: MicroBatch) -> Candidates:
        """Return the candidates of each prediction [M], at the samples' temperatures. No gradient."""

    @abstractmethod
    def logprobs(self, micro: MicroBatch) -> Tensor:
        """Return the logprobs of the targets [M], at the samples' temperatures; NaN where unknown.

        No gradient.
        """

    def known(self, micro: MicroBatch) -> Tensor:
        """Return which predictions have teacher logprobs, bool [M]."""
        return torch.ones_like(micro.targets, dtype=torch.bool)

    def reader(self, micro: MicroBatch) -> Read | None:
        """Return a function from the policy's distributions to their divergence [M]; None if it is estimated."""
        if self.options.estimate == "sampled":
            return None
        options = self.options
        return partial(divergence_from, candidates=self.candidates(micro), beta=options.beta, clip=options.clip)

    def lesson(self, micro: MicroBatch, scores: TokenLogprobs) -> Lesson:
        """Return the teacher's contribution, given the policy's ``scores`` of the loss tokens [N]."""
        weights = micro.teacher_weights[micro.row] * at_loss_tokens(self.known(micro), micro)
        if scores.read is not None:
            return Lesson(micro.advantages, weights * scores.read, _metrics(scores.read, weights))
        teacher = at_loss_tokens(self.logprobs(micro), micro)
        distance = sampled_reverse_kl(scores.logprobs.detach(), teacher)
        _, per_token = count_rows(micro.row, micro.advantages)
        advantages = micro.advantages if per_token else micro.advantages[micro.row]
        return Lesson(advantages - weights * distance, metrics=_metrics(distance, weights))


class ToldTeacher(Teacher):
    """Teacher outside the trainer: micro-batches carry the logprobs of a server, or of the environments' own teacher.

    Tokens without teacher logprobs contribute nothing.
    """

    def candidates(self, micro: MicroBatch) -> Candidates:
        assert micro.teacher_ids is not None and micro.teacher_logprobs is not None, "reader() has looked"
        return Candidates(micro.teacher_logprobs, micro.teacher_ids, whole=False)

    def logprobs(self, micro: MicroBatch) -> Tensor:
        silent = micro.inverse_temperature.new_full(micro.targets.shape, torch.nan)
        return silent if micro.teacher_sampled is None else micro.teacher_sampled

    def known(self, micro: MicroBatch) -> Tensor:
        if self.options.estimate == "exact" and micro.teacher_ids is not None:
            return (micro.teacher_ids >= 0).any(-1)
        return ~self.logprobs(micro).isnan()

    def reader(self, micro: MicroBatch) -> Read | None:
        """Return the reader, as for any teacher. Raises TrainingError if a server's logprobs are missing."""
        if micro.teacher_ids is not None:
            return super().reader(micro)
        if self.options.kind == "url" and bool((micro.teacher_weights > 0).any()) and micro.row.numel():
            raise TrainingError(
                "the samples lack their teacher's logprobs",
                remedy="get them first: lachesis.plugins.teachers.teacher.Asked(...).teach(groups)",
            )
        return None


@dataclass(eq=False)
class TeacherModel(Teacher):
    """Teacher that is a frozen model beside the policy.

    Args:
        model: placed where the policy's is.
        plan: how it is run.
        vocab: the policy's outcomes; tokens that only one of the two models has are lumped together.
    """

    model: PreTrainedModel
    _: KW_ONLY
    plan: ForwardPlan
    vocab: int

    @torch.no_grad()
    def candidates(self, micro: MicroBatch) -> Candidates:
        top_k, sizes = self.options.top_k, set[int]()

        def read(log_p: Tensor, chunk: slice) -> Tensor:
            sizes.add(log_p.shape[1])
            shared = log_p[:, : self.vocab]
            if top_k is None or top_k >= shared.shape[1]:
                return shared
            top = shared.topk(top_k)
            # Token ids share one tensor with the values: in float32, which that is at least, they are exact.
            return torch.cat([top.values, top.indices.to(top.values.dtype)], dim=1)

        found = distributions(self.model, micro, plan=self.plan, read=read)
        (size,) = sizes
        shared = min(size, self.vocab)
        if top_k is None or top_k >= shared:
            return Candidates(found, None, whole=shared == size)
        logprobs, ids = found.tensor_split(2, dim=1)
        return Candidates(logprobs, ids.long(), whole=False)

    @torch.no_grad()
    def logprobs(self, micro: MicroBatch) -> Tensor:
        return target_logprobs(self.model, micro, plan=self.plan).logprobs


@dataclass(eq=False)
class SelfTeacher(Teacher):
    """Teacher that is the policy or its reference, with a longer prompt before the same completion.

    With weights of a reference and a solution in the prompt it is that of OPSD (arXiv 2601.18734), with a demonstration
    and an average of the policy that of SDFT (2601.19897), with another completion's solution or feedback that of SDPO
    (2601.20802).

    Args:
        weights: makes a context in which a model has the teacher's weights.
        plan, vocab: as for :class:`TeacherModel`.
    """

    weights: Callable[[], AbstractContextManager[PreTrainedModel]]
    _: KW_ONLY
    plan: ForwardPlan
    vocab: int

    def candidates(self, micro: MicroBatch) -> Candidates:
        found = self._asked(micro, lambda teacher, taught: teacher.candidates(taught))
        places = _places(micro)
        ids = None if found.ids is None else found.ids[places]
        return found._replace(logprobs=found.logprobs[places], ids=ids)

    def logprobs(self, micro: MicroBatch) -> Tensor:
        return self._asked(micro, lambda teacher, taught: teacher.logprobs(taught))[_places(micro)]

    def known(self, micro: MicroBatch) -> Tensor:
        return super().known(micro) if micro.taught_index is None else micro.taught_index >= 0

    def reader(self, micro: MicroBatch) -> Read | None:
        """Return the reader, as for any teacher; None where no completion has a teacher.

        Ranks that share the weights meet in each pass, so a rank without a completion runs an idle one.
        """
        if micro.taught is None and self.options.estimate == "exact":
            self._asked(micro, lambda teacher, taught: teacher.logprobs(taught))
        return None if micro.taught is None else super().reader(micro)

    def lesson(self, micro: MicroBatch, scores: TokenLogprobs) -> Lesson:
        if micro.taught is not None:
            return super().lesson(micro, scores)
        if self.options.estimate == "sampled":
            self._asked(micro, lambda teacher, taught: teacher.logprobs(taught))
        return Lesson(micro.advantages)

    def _asked(self, micro: MicroBatch, ask: Callable[[TeacherModel, MicroBatch], T]) -> T:
        taught = idle_micro_batch().to(micro.row.device) if micro.taught is None else micro.taught
        with self.weights() as model:
            return ask(TeacherModel(model, plan=self.plan, vocab=self.vocab, options=self.options), taught)


@dataclass(eq=False)
class TeacherOfEach:
    """Several teachers, of which each micro-batch has one: the one with its number, or none.

    Args:
        teachers: in the order of their numbers.
        together: ranks share the models and meet in each pass, so each teacher that is not asked makes an idle one.
    """

    teachers: Sequence[Teacher]
    together: bool

    def reader(self, micro: MicroBatch) -> Read | None:
        """Return the reader of the micro-batch's teacher, as :meth:`Teacher.reader`."""
        found = None
        for number, teacher in enumerate(self.teachers):
            if number == micro.teacher:
                found = teacher.reader(micro)
            elif self.together:
                teacher.reader(idle_micro_batch().to(micro.row.device))
        return found

    def lesson(self, micro: MicroBatch, scores: TokenLogprobs) -> Lesson:
        """Return the contribution of the micro-batch's teacher, as :meth:`Teacher.lesson`."""
        found = Lesson(micro.advantages)
        for number, teacher in enumerate(self.teachers):
            if number == micro.teacher:
                found = teacher.lesson(micro, scores)
            elif self.together and teacher.options.estimate == "sampled":
                nothing = scores.logprobs.new_empty(0)
                teacher.lesson(idle_micro_batch().to(micro.row.device), TokenLogprobs(nothing, nothing))
        return found


def _places(micro: MicroBatch) -> Tensor:
    """Return the teacher's prediction for each of the policy's; an arbitrary one where it has none."""
    assert micro.taught_index is not None, "reader() has looked"
    return micro.taught_index.clamp(min=0)


@contextmanager
def in_eval_mode(model: PreTrainedModel) -> Generator[PreTrainedModel]:
    """Switch off training-only behaviour, such as an adapter's dropout, within the block."""
    training = model.training
    model.eval()
    try:
        yield model
    finally:
        model.train(training)


def build_teacher(
    model: PreTrainedModel | None,
    *,
    options: TeacherConfig,
    packing: Packing,
    device: torch.device,
    student: PreTrainedModel,
    plan: ForwardPlan,
    reference: Reference | None = None,
    context: ContextGroup | None = None,
) -> Teacher:
    """Build the teacher that the options name.

    Args:
        model: the teacher's, if it is one of ours: loaded, and placed like the policy's.
        student: the policy's model, and ``plan`` how it is run.
        reference: the policy's, if it is the teacher.
        context: the ranks that share the tokens of a micro-batch.

    Raises:
        ModelError: the teacher cannot be run as ``packing`` demands.
    """
    vocab: int = student.config.get_text_config().vocab_size  # pyright: ignore[reportUnknownMemberType]  # its stub is bare
    if options.kind == "self":
        weights = partial(in_eval_mode, student) if options.weights_of == "policy" else None
        if weights is None:
            assert reference is not None, "holds_reference has asked for it"
            weights = reference.weights
        return SelfTeacher(weights, plan=plan, vocab=vocab, options=options)
    if options.kind != "model":
        return ToldTeacher(options=options)
    assert model is not None, "load_teacher() loads it"
    plan = plan_forward(model, packing=packing, device=device, context=context)
    return TeacherModel(model, plan=plan, vocab=vocab, options=options)


def divergence_from(
    log_p: Tensor, chunk: slice, *, candidates: Candidates, beta: float, clip: float | None = None
) -> Tensor:
    """Return the divergence of the policy's log-probabilities [C, V] for ``chunk`` from the candidates': [C].

    It is exact if the candidates are the whole vocabulary of both; otherwise all other tokens are one outcome.
    """
    teacher = candidates.logprobs[chunk].to(log_p.dtype)
    width = teacher.shape[1]
    whole = candidates.whole and width == log_p.shape[1]
    if candidates.ids is None:
        student = log_p[:, :width]
    else:
        ids = candidates.ids[chunk]
        named = (ids >= 0) & (ids < log_p.shape[1])  # tokens that only the teacher has count as the rest
        student = log_p.gather(1, ids.where(named, 0)).where(named, IMPOSSIBLE)
        teacher = teacher.where(named, IMPOSSIBLE)
        whole = whole or (width == log_p.shape[1] and bool(named.all()))
    if not whole:
        student, teacher = with_rest(student), with_rest(teacher)
    return divergence(student, teacher, beta=beta, clip=clip)


def shares(options: TeacherConfig) -> Callable[[Group], Shares]:
    """Return a function that gives the rewards' and the teacher's shares of a group's loss, by its environment."""

    def of_group(group: Group) -> Shares:
        name = str(group.prompt.columns.get(options.column))
        return Shares(
            reward=options.reward_weights.get(name, options.reward_weight),
            teacher=options.weights.get(name, options.weight),
        )

    return of_group


def shares_by_source(teachers: Mapping[str, TeacherConfig]) -> Callable[[Group], Shares]:
    """Return :func:`shares` of each group by the teacher of its source; those of rewards alone without one."""
    numbered = {name: (number, shares(options)) for number, (name, options) in enumerate(teachers.items())}

    def of_group(group: Group) -> Shares:
        number, of_teacher = numbered.get(group.prompt.source, (len(numbered), None))
        return Shares(teacher=0.0, number=number) if of_teacher is None else of_teacher(group)._replace(number=number)

    return of_group


def _metrics(distance: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Return ``distill_kl``: the mean over the tokens that have teacher logprobs."""
    counted = (weights > 0).to(distance.dtype)
    return {"distill_kl": torch.stack([(distance.detach() * counted).sum(), counted.sum()])}
