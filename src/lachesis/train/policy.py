"""Policy: forward, loss, backward over a batch's micro-batches, and the optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lachesis.bridges.sent_weights import base_parameters, full_digests, full_weights
from lachesis.common.types import Group, Sample, VersionSpan
from lachesis.config.schema import AlgorithmConfig, BatchConfig
from lachesis.metrics.values import Max, Mean, MetricValue, Sum, reduce_metrics
from lachesis.train.batch import Batch, MicroBatch, idle_micro_batch, pack, plain_micro_batch
from lachesis.train.canary import CanaryReader
from lachesis.train.checkpoint import save_model
from lachesis.train.distributed.strategy import Strategy
from lachesis.train.host_memory import HostMemory
from lachesis.train.iterations import OldLogprobStore
from lachesis.train.losses.covariance import USES_COVARIANCE, CovarianceCut, covariance_cut
from lachesis.train.losses.custom import CustomLoss
from lachesis.train.losses.kl import KlWeight
from lachesis.train.losses.loss import PolicyLoss, high_entropy_threshold, policy_loss, sft_loss
from lachesis.train.losses.ratios import count_rows, gather_terms
from lachesis.train.losses.reference import Reference, SamplerReference, build_reference, second_model
from lachesis.train.losses.teacher import Lesson, Teacher, TeacherOfEach, build_teacher
from lachesis.train.model.experts import ExpertRouting, watch_experts
from lachesis.train.model.forward import (
    ForwardPlan,
    Packing,
    loss_token_logprobs,
    plan_forward,
    target_logprobs,
    valid_rows,
)
from lachesis.train.model.head import Read, TokenLogprobs
from lachesis.train.model.loading import LoadedModel, write_whole
from lachesis.train.model.router_replay import RouterReplay
from lachesis.train.optim.optimizer import PolicyOptimizer
from lachesis.train.policy_state import PolicyState
from lachesis.train.route_tensors import UNKNOWN
from lachesis.transport.digest import add_up, share_digests

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

OptimizerBuilder = Callable[[Sequence[tuple[str, torch.nn.Parameter]]], PolicyOptimizer]
"""Function that makes the optimizer over the trained parameters."""


class StepCounts(NamedTuple):
    """Counts by which a loss is normalized, over the whole optimizer step and all ranks.

    ``entropy_threshold`` and ``num_high_entropy_tokens`` are ``None`` where every token is kept, and ``covariance``
    where no token is chosen by it.
    """

    num_sequences: int
    num_tokens: int
    entropy_threshold: Tensor | None = None
    num_high_entropy_tokens: float | None = None
    covariance: CovarianceCut | None = None


class Policy(PolicyState):
    """Policy model that learns from batches.

    Args:
        loaded: model, tokenizer and adapter.
        strategy: how the model is placed and sharded.
        optimizer_builder: makes the optimizer.
        options: the loss, as the configuration's rules allow it.
        max_completion_length: as ``sampling.max_completion_length``; ``dr_grpo`` divides by it.
        packing: as ``model.packing``.
        compile_layers: compile decoder layers.
        custom_loss: replaces the loss type's loss of a token.
        teachers: the models that teach, by source (the only one under an empty name): loaded, frozen, not yet placed.

    Raises:
        ModelError: the model cannot be run as ``packing`` demands, or its routing cannot be replayed.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        strategy: Strategy,
        optimizer_builder: OptimizerBuilder,
        options: AlgorithmConfig,
        max_completion_length: int | None = None,
        packing: Packing = "auto",
        compile_layers: bool = False,
        custom_loss: CustomLoss | None = None,
        teachers: Mapping[str, PreTrainedModel] | None = None,
    ) -> None:
        self.loaded = loaded
        self.model: PreTrainedModel | PeftModel = loaded.model
        self.transformer: PreTrainedModel = loaded.transformer
        self.options = options
        self.max_completion_length = max_completion_length
        self.custom_loss = custom_loss
        self.strategy = strategy
        # An adapter's dropout and float8 are only for the loss: probes, canary and engine use the plain network.
        self.model.eval()
        self._loss_reads_reference: bool = options.loss_beta > 0 or (
            custom_loss is not None and custom_loss.needs_reference
        )
        kl_reference = options if options.holds_reference or self._loss_reads_reference else None
        second = second_model(loaded, kl_reference)  # before sharding, because a sharded model cannot be copied
        taught_by = teachers or {}
        self._place(second, *{id(model): model for model in taught_by.values()}.values())
        self.device: torch.device = strategy.device(self.transformer)
        self.plan: ForwardPlan = plan_forward(
            self.transformer, packing=packing, device=self.device, context=strategy.context
        )
        # Before the hooks that watch the experts, because hooks see the outputs as earlier hooks changed them.
        self.replay: RouterReplay | None = self._learn_routers() if options.router_replay else None
        self.routing: ExpertRouting | None = watch_experts(self.transformer, coefficient=options.router_aux_loss_coef)
        self.reference: Reference | None = (
            build_reference(loaded, plan=self.plan, options=kl_reference, second=second) if kl_reference else None
        )
        self.teacher: Teacher | TeacherOfEach | None = self._build_teacher(taught_by, packing)
        if compile_layers:
            strategy.compile(self.transformer)
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.optimizer: PolicyOptimizer = optimizer_builder(trained)
        self._canary = CanaryReader(self.transformer, plan=self.plan, device=self.device, capture=not strategy.together)
        self._old = OldLogprobStore()
        self.kl_weight: KlWeight = KlWeight.of(options)
        self._saving = None
        self._host_memory = HostMemory()
        # Other users of these modules, such as an engine that generates in another thread, wait meanwhile, because
        # training mode, float8 and a switched-off adapter are states of the modules.
        self.alone: Callable[[], AbstractContextManager[object]] = nullcontext
        # Packs groups into a batch; set by the code that knows the batch section.
        self.pack: Callable[[Sequence[Group]], Batch] = partial(
            pack, max_tokens=BatchConfig().max_tokens_per_microbatch, share_prefixes=self.plan.packed
        )

    def _place(self, second: PreTrainedModel | None, *teachers: PreTrainedModel) -> None:
        """Place the models as the strategy says, and read the base weights that were not loaded yet."""
        for model in (self.transformer, second, *teachers):
            if model is not None:
                self.strategy.place(model)
                if self.loaded.unread is not None and model not in teachers:
                    self.loaded.unread.fill(model)

    def _build_teacher(self, models: Mapping[str, PreTrainedModel], packing: Packing) -> Teacher | TeacherOfEach | None:
        built = [
            build_teacher(
                models.get(name),
                options=options,
                packing=packing,
                device=self.device,
                student=self.transformer,
                plan=self.plan,
                reference=self.reference,
                context=self.strategy.context,
            )
            for name, options in self.options.all_teachers.items()
        ]
        if self.options.teachers:
            return TeacherOfEach(built, together=self.strategy.together)
        return built[0] if built else None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer."""
        return self.loaded.tokenizer

    @property
    def ignores_zero_advantage(self) -> bool:
        """Return True if rows with an advantage of 0 can be left out without effect.

        A custom loss may use them in any way.
        """
        return self.options.ignores_zero_advantage and self.custom_loss is None

    def forward_backward(self, groups: Sequence[Group]) -> dict[str, float]:
        """Run :meth:`accumulate` on groups whose advantages are set; return the metrics as numbers.

        Raises:
            TrainingError: no sample has a token to learn from.
        """
        return reduce_metrics(self.accumulate(self.pack(groups)))

    def logprobs(self, groups: Sequence[Group]) -> list[list[Tensor]]:
        """Return the current logprobs of each sample's completion tokens, by group: float [tokens], on the CPU.

        They come from log-softmax(logits / temperature) at the sample's temperature, as in the loss.

        Raises:
            TrainingError: no sample has a token.
        """
        packed = self.pack(_numbered(groups, masked=False))
        fresh = [
            replace(micro, old_logprobs=torch.full_like(micro.old_logprobs, torch.nan))
            for micro in packed.micro_batches
        ]
        return _by_sample(groups, self.recompute_logprobs(replace(packed, micro_batches=tuple(fresh))))

    def divergences(self, groups: Sequence[Group]) -> list[list[Tensor]]:
        """Return log π_old - log π_ref of each sample's counted tokens, by group: float [tokens], on the CPU.

        π_old is the importance ratio's (:mod:`lachesis.train.iterations`), so usually the sampler.

        Raises:
            TrainingError: no sample has a token to learn from.
        """
        packed = self.pack(_numbered(groups, masked=True))
        old = self.recompute_logprobs(packed) if packed.lacks_old_logprobs else packed
        each = zip(_by_sample(groups, old), _by_sample(groups, self.score_reference(packed)), strict=True)
        return [[mine - theirs for mine, theirs in zip(*pair, strict=True)] for pair in each]

    def save(self, directory: str | Path) -> None:
        """Save the model as transformers loads it, or the adapter as peft does, with the tokenizer.

        Raises:
            CheckpointError: the disk is full, or the directory holds something else.
        """
        sharded, adapted = self.strategy.sharded, self.model is not self.transformer
        save_model(
            self.model,
            self.tokenizer,
            Path(directory),
            weights=self.weights() if sharded and adapted else None,
            write=None if adapted else self._write_files if sharded else self.loaded.writer(),
            companions=() if adapted else self.loaded.processors,
        )

    def _write_files(self, directory: Path) -> None:
        """Write a sharded model, of which at most one file's worth is whole at a time."""
        weights = full_weights(self.model, whole=self.whole)
        write_whole(self.transformer, self.tokenizer, self.loaded.whole, weights, directory)

    def accumulate(self, batch: Batch) -> dict[str, MetricValue]:
        """Run forward and backward over all micro-batches; gradients add up, nothing is updated.

        The gradient is that of the loss over the whole batch, whatever the split into micro-batches, and over all
        ranks. A batch of several iterations is passed once for each, in order. If no rank has a micro-batch, there is
        no gradient, and the optimizer leaves the weights unchanged.
        """
        micro_batches = self._passes(batch)
        self._old.begin(batch, num_passes=len(micro_batches))
        parts = []
        with self.alone(), self.loaded.float8.on():
            counts = self._count(batch, micro_batches)
            num_inputs = self._num_inputs(batch)
            self.model.train()
            for index, micro in enumerate(micro_batches):
                micro = micro.to(self.device)
                self.strategy.begin_pass(last=index + 1 == len(micro_batches))
                with self._replayed(micro, counting=True):
                    output = self._loss(batch, index, micro, counts, num_inputs=num_inputs)
                    output.loss.backward()
                parts.append({"loss": output.loss.detach(), **output.metrics})
            self.model.eval()
        # One transfer for all micro-batches: reading a number off a GPU waits for all work before it.
        metrics = _fetch(parts)
        self._adapt_kl(batch, metrics)
        metrics["tokens_trained"] = Sum(float(batch.num_tokens))
        metrics["tokens_forward"] = Sum(float(sum(micro.num_inputs for micro in batch.micro_batches)))
        metrics["tokens_distinct"] = Sum(float(batch.distinct_tokens))
        metrics["tokens_flat"] = Sum(float(batch.flat_tokens))
        metrics["micro_batches"] = Sum(float(len(batch.micro_batches)))
        metrics |= {} if self.routing is None else self.routing.take(self.strategy.sum_values)
        metrics |= {} if self.replay is None else self.replay.take()
        metrics["skipped_zero_advantage"] = Sum(float(batch.skipped_sequences))
        return metrics

    def _adapt_kl(self, batch: Batch, metrics: Mapping[str, MetricValue]) -> None:
        """Adapt the weight of the KL term in the loss to its mean over the tokens of all ranks."""
        if self.options.loss_beta == 0 or self.options.kl_target is None or batch.objective == "sft":
            return
        own = metrics.get("kl_reference", Mean(0.0, 0.0))  # none of a rank without a token
        assert isinstance(own, Mean)
        pair = self.strategy.sum_values(torch.tensor([own.total, own.weight], dtype=torch.float64))
        (completions,) = self.strategy.sum_counts(batch.num_sequences)
        if pair[1] > 0:
            self.kl_weight.observe(float(pair[0] / pair[1]), completions=completions)

    def step(self) -> dict[str, MetricValue]:
        """Clip, update, advance the schedule, clear the gradients.

        Raises:
            TrainingError: the gradient was not finite too many times in a row; the weights are unchanged.
        """
        rate = self.optimizer.learning_rate
        self.strategy.sum_gradients([p for p in self.model.parameters() if p.requires_grad])
        norm = self.optimizer.step()
        self.optimizer.zero_grad()
        if self.reference is not None:
            self.reference.after_step(self.optimizer.steps_taken)
        skipped = Sum(float(self.optimizer.skipped))
        metrics = {"grad_norm": Mean(norm), "learning_rate": Mean(rate), "skipped_steps": skipped}
        return metrics | self.kl_weight.take_metrics()

    def make_room(self) -> None:
        """Release the allocator's unused GPU memory for an engine beside the policy."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def canary(self, token_ids: Sequence[int]) -> list[float]:
        """Return logprobs of ``token_ids[1:]`` at temperature 1, computed as in training."""
        return self._canary.read(token_ids)

    def weight_digests(self, *, quantized: Collection[str] = ()) -> dict[str, int]:
        """Return digests of all weights as an engine holds them: adapter merged, ``quantized`` in 8 bits with scales.

        Ranks with parts of the weights gather nothing for plain ones: the digests of their rows add up.
        """
        if not self.strategy.sharded:
            return full_digests(self.model, quantized=quantized)
        if self.model is self.transformer and not quantized:
            return add_up(self.digest_shares(), names=base_parameters(self.model))
        return full_digests(self.model, whole=self.whole, quantized=quantized)

    def digest_shares(self) -> list[dict[str, int]]:
        """Return each rank's contribution to the weights' digests."""
        return [share_digests(self.strategy.shares(base_parameters(self.model)))]

    @torch.no_grad()
    def recompute_logprobs(self, batch: Batch) -> Batch:
        """Return the batch with the trainer's π_old computed now, if it would be that of its first use.

        Log s is unchanged, and so is a π_old that equals s. All ranks call it together.
        """
        with self.alone(), self.loaded.float8.on():
            scored = [(micro, self._scored(micro).logprobs.cpu()) for micro in self._passes(batch)]
        fixed = [
            replace(micro, old_logprobs=torch.where(micro.old_logprobs.isnan(), now, micro.old_logprobs.to(now.dtype)))
            for micro, now in scored
        ]
        return replace(batch, micro_batches=tuple(fixed[: len(batch.micro_batches)]))

    def score_reference(self, batch: Batch) -> Batch:
        """Return the batch with log π_ref in place of log π_old; all ranks call it together."""
        with self.alone(), self.loaded.float8.on():
            scored = [(micro, self._reference_logprobs(micro.to(self.device))) for micro in self._passes(batch)]
        found = [replace(micro, old_logprobs=values.cpu()) for micro, values in scored if values is not None]
        return replace(batch, micro_batches=tuple(found[: len(batch.micro_batches)]))

    def _passes(self, batch: Batch) -> Sequence[MicroBatch]:
        """Return the batch's micro-batches, and idle ones up to the number of the busiest rank.

        Each rank leaves out rows without an advantage by itself; all agree on the number of passes before the first
        collective.
        """
        idle = self.strategy.max_count(len(batch.micro_batches)) - len(batch.micro_batches)
        # Unchanged if nothing is added, so that work on the first begins before the second is made.
        return [*batch.micro_batches, *(idle_micro_batch() for _ in range(idle))] if idle else batch.micro_batches

    @torch.no_grad()
    def _count(self, batch: Batch, micro_batches: Sequence[MicroBatch]) -> StepCounts:
        """Return the counts of the step.

        An entropy quantile, or a choice by covariance, is over all tokens of the step and takes a first pass.
        """
        num_sequences, num_tokens = self.strategy.sum_counts(batch.num_sequences, batch.num_tokens)
        counts, top = StepCounts(num_sequences, num_tokens), self.options.top_entropy_quantile
        by_covariance = self.options.loss_type in USES_COVARIANCE and self.custom_loss is None
        if not micro_batches or (top == 1 and not by_covariance):
            return counts
        scored = [self._scored(micro) for micro in micro_batches]
        if by_covariance:
            logprobs = [scores.logprobs for scores in scored]
            counts = counts._replace(covariance=self._covariance(batch, micro_batches, logprobs=logprobs))
        if top == 1:
            return counts
        entropies = self.strategy.gather_values(torch.cat([scores.entropies for scores in scored]))
        threshold = high_entropy_threshold(entropies, mask=torch.ones_like(entropies), top_quantile=top)
        reached = float((entropies >= threshold).sum())
        return counts._replace(entropy_threshold=threshold, num_high_entropy_tokens=reached)

    def _covariance(
        self, batch: Batch, micro_batches: Sequence[MicroBatch], *, logprobs: Sequence[Tensor]
    ) -> CovarianceCut:
        """Return the statistics for choosing the step's tokens by covariance, given this rank's current logprobs."""
        olds = [
            self._old.known(batch, index, micro.to(self.device), current=current)
            for index, (micro, current) in enumerate(zip(micro_batches, logprobs, strict=True))
        ]
        gather = self.strategy.gather_values
        everything = gather(torch.cat([*logprobs]))
        return covariance_cut(
            gather_terms(
                everything,
                row=torch.arange(len(everything), device=self.device),
                mask=torch.ones_like(everything),
                advantages=gather(torch.cat([_of_tokens(micro).to(self.device) for micro in micro_batches])),
                old_logprobs=gather(torch.cat(olds)),
                sampling_logprobs=None,
                ref_logprobs=None,
                entropies=None,
                options=self.options,
            ),
            self.options,
        )

    def _num_inputs(self, batch: Batch) -> int:
        """Return the tokens of the step that go through the model, over all ranks.

        Returns 0 if nothing is normalized by them.
        """
        if self.routing is None or not self.routing.coefficient:
            return 0
        return self.strategy.sum_counts(sum(micro.num_inputs for micro in batch.micro_batches))[0]

    @contextmanager
    def _routed(self, micro: MicroBatch, *, num_inputs: int) -> Iterator[list[Tensor]]:
        """Watch the experts of a mixture; the yielded list has their auxiliary loss after the block, if any.

        An idle pass does not count.
        """
        auxiliary: list[Tensor] = []
        if self.routing is None or not micro.row.numel():
            yield auxiliary
            return
        with self.routing.watched() as routed:
            yield auxiliary
        valid, context = None if self.plan.packed else valid_rows(micro).reshape(-1), self.plan.context
        self.routing.count(routed, valid=valid if context is None else context.holds(micro.num_inputs))
        if context is not None:  # the loss is one of all tokens of the micro-batch
            routed.logits = [context.gather(logits, total=micro.num_inputs) for logits in routed.logits]
        if self.routing.coefficient:
            share = micro.num_inputs / num_inputs
            auxiliary.append(self.routing.auxiliary_loss(routed, valid=valid, share=share))

    def _loss(self, batch: Batch, index: int, micro: MicroBatch, counts: StepCounts, *, num_inputs: int) -> PolicyLoss:
        if batch.objective == "sft":
            with self._routed(micro, num_inputs=num_inputs) as auxiliary:
                taught = sft_loss(self._scores(micro).logprobs, num_tokens=counts.num_tokens)
            return PolicyLoss(sum(auxiliary, taught.loss), taught.metrics)
        reference = self._reference_logprobs(micro) if self._loss_reads_reference else None
        read = None if self.teacher is None else self.teacher.reader(micro)
        with self._routed(micro, num_inputs=num_inputs) as auxiliary:
            scores = self._scores(micro, read=read)
        lesson = Lesson(micro.advantages) if self.teacher is None else self.teacher.lesson(micro, scores)
        current = scores.logprobs.detach()
        if isinstance(self.reference, SamplerReference) and reference is not None:
            # If the sampler's logprob is unknown, the KL is 0.
            reference = torch.where(reference.isnan(), current, reference.to(current.dtype))
        output = policy_loss(
            scores.logprobs,
            row=micro.row,
            mask=torch.ones_like(current),
            advantages=lesson.advantages,
            teacher_loss=lesson.loss,
            old_logprobs=self._old.take(batch, index, micro, current=current),
            sampling_logprobs=micro.sampling_logprobs if self._uses_sampler else None,
            ref_logprobs=reference,
            entropies=scores.entropies,
            options=self.options
            if self.options.kl_target is None
            else self.options.model_copy(update={"beta": self.kl_weight.value}),
            max_completion_length=self.max_completion_length,
            token_loss=self.custom_loss,
            **counts._asdict(),
        )
        metrics = {**output.metrics, **lesson.metrics, **self._alignment(current, micro)}
        return PolicyLoss(sum(auxiliary, output.loss), metrics)

    def _alignment(self, current: Tensor, micro: MicroBatch) -> dict[str, Tensor]:
        """Measure the difference of trainer and sampler: (sum, count) [2], and the largest (-inf without tokens).

        Only tokens sampled by the current weights count; others differ because of later updates.
        """
        fresh = (micro.versions == self.optimizer.steps_taken)[micro.row]
        difference = torch.where(fresh, (current - micro.sampling_logprobs).abs(), torch.nan)
        known = ~difference.isnan()
        pair = torch.stack([difference.nansum(), known.sum().to(difference.dtype)])
        largest = torch.nn.functional.pad(difference.nan_to_num(-torch.inf, posinf=torch.inf), (0, 1), value=-torch.inf)
        return {"logprob_diff_mean": pair, "logprob_diff_max": largest.max()}

    @property
    def _uses_sampler(self) -> bool:
        options = self.options
        corrects = options.sampler_correction != "none" or options.off_policy_mask_threshold is not None
        return corrects or self.custom_loss is not None

    def _reference_logprobs(self, micro: MicroBatch) -> Tensor | None:
        """Return the reference's logprobs by its own choice of experts, even if its modules are the policy's."""
        if self.reference is None:
            return None
        with nullcontext() if self.replay is None else self.replay.replaying(None):
            return self.reference.logprobs(micro)

    def _learn_routers(self) -> RouterReplay:
        """Prepare the replay of routers. Raises ModelError if the model's routing cannot be replayed."""
        replay = RouterReplay(self.transformer)
        tokens = [token % self.transformer.config.get_text_config().vocab_size for token in range(3, 11)]
        with torch.no_grad(), replay.learning():
            target_logprobs(self.transformer, plain_micro_batch(tokens).to(self.device), plan=self.plan)
        return replay

    def _replayed(self, micro: MicroBatch, *, counting: bool = False) -> AbstractContextManager[object]:
        """Send the policy's tokens through the experts they were sampled with, if that is configured."""
        if self.replay is None:
            return nullcontext()
        routed = micro.routed
        if routed is not None and not self.plan.packed:
            valid = valid_rows(micro)
            rows = routed.new_full((*valid.shape, *routed.shape[1:]), UNKNOWN)
            rows[valid] = routed
            routed = rows.flatten(0, 1)
        return self.replay.replaying(routed, counting=counting)

    def _scored(self, micro: MicroBatch) -> TokenLogprobs:
        micro = micro.to(self.device)
        with self._replayed(micro):
            return self._scores(micro)

    def _scores(self, micro: MicroBatch, *, read: Read | None = None) -> TokenLogprobs:
        return loss_token_logprobs(self.transformer, micro, plan=self.plan, read=read)


def _of_tokens(micro: MicroBatch) -> Tensor:
    """Return the advantage of each loss token: [N]."""
    _, per_token = count_rows(micro.row, micro.advantages)
    return micro.advantages if per_token else micro.advantages[micro.row]


def _numbered(groups: Sequence[Group], *, masked: bool) -> list[Group]:
    """Return the groups with each sample's number, from 0, as its version, and every token counted if not ``masked``.

    The number identifies a packed row: packing changes the order, and merges equal completions. No sample is left out
    for lack of an advantage.
    """
    number = count()

    def numbered(sample: Sample) -> Sample:
        version = next(number)
        return replace(
            sample,
            mask=sample.mask if masked else None,
            finish_reason="stop",
            token_advantages=None,
            advantage=1.0,
            versions=VersionSpan(version, version),
        )

    return [replace(group, samples=tuple(numbered(sample) for sample in group.samples)) for group in groups]


def _by_sample(groups: Sequence[Group], batch: Batch) -> list[list[Tensor]]:
    """Return the old logprobs of a batch of :func:`_numbered` groups by group and sample; empty without a token."""
    found: dict[int, Tensor] = {}
    for micro in batch.micro_batches:
        for row, number in enumerate(micro.versions.tolist()):
            found[number] = micro.old_logprobs[micro.row == row]
    number = count()
    return [[found.get(next(number), torch.empty(0)) for _ in group.samples] for group in groups]


def _fetch(parts: Sequence[dict[str, Tensor]]) -> dict[str, MetricValue]:
    """Merge the micro-batches' values on the device and fetch all at once.

    Pairs [2] are (weighted sum, weight); scalars are maxima if their name says so, else sums. They are summed in
    float64 if the device has it: in float32 the sum depends on the number of micro-batches.
    """
    if not parts:
        return {"loss": Sum(0.0)}
    metrics: dict[str, MetricValue] = {}
    wide = torch.float32 if parts[0]["loss"].device.type == "mps" else torch.float64
    merged = {name: torch.stack([part[name] for part in parts]).to(wide) for name in parts[0]}
    merged = {name: values.amax(0) if name.endswith("_max") else values.sum(0) for name, values in merged.items()}
    numbers = iter(torch.cat([value.flatten() for value in merged.values()]).tolist())
    for name, value in merged.items():
        if value.dim() == 1:
            metrics[name] = Mean(next(numbers), next(numbers))
        else:
            metrics[name] = Max(next(numbers)) if name.endswith("_max") else Sum(next(numbers))
    return metrics
