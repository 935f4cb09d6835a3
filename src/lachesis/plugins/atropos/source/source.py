"""Groups that environments push to a rollout API. Only this module and its two helpers know the protocol's quirks."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal

from lachesis.common.deadline import Deadline, Retry
from lachesis.common.errors import DataError, DeadlineExceeded, EngineError, StopRequested
from lachesis.common.types import EngineHealth, Group
from lachesis.config.schema import LachesisConfig
from lachesis.engines.base import Engine
from lachesis.plugins.atropos.api.wire import Registration
from lachesis.plugins.atropos.section import AtroposSourceConfig
from lachesis.plugins.atropos.source.client import (
    Delivery,
    Replaced,
    RolloutApiClient,
    TrainerNotRegistered,
    TrainerRegistration,
)
from lachesis.plugins.atropos.source.convert import Conversion, Unusable, convert_group
from lachesis.process.threads import Watch, begin
from lachesis.rollouts.base import RolloutSource
from lachesis.rollouts.generation import nested_deadline
from lachesis.run.pulse import FROM_OTHERS

logger = logging.getLogger("lachesis")

MissingLogprobs = Literal["warn", "error"]
"""Treatment of groups without behaviour logprobs: use the trainer's own, with a warning, or end the run."""

# One batch without a usable group may be bad luck; this many in a row mean a broken environment.
_MOST_UNUSABLE_BATCHES = 10
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
_FIRST_WORD_S, _REPEAT_S = 10.0, 30.0
_REACH_S = 30.0
_ACKNOWLEDGE_S = 10.0
_GOODBYE_S = 2.0
_LOOK_EVERY_S = 5.0


@dataclass(eq=False)
class AtroposSource(RolloutSource):
    """Source of a rollout API's batches, each the groups of one optimizer step.

    With our API no batch is lost or trained on twice, however the trainer ends: a batch is acknowledged once its effect
    is safe: in a checkpoint if the run writes any, otherwise after the optimizer step; the last ones are acknowledged
    at the end of the run. Until then the API hands it out again to a trainer that registers again; a batch that the
    checkpoint already includes is recognized by its content, acknowledged and skipped. With the plain protocol a batch
    leaves the API when it is fetched, and one in transit when the run stops is lost. Groups that cannot be trained on
    are set aside with their reason and counted, not given a reward of 0.

    Args:
        registration: the trainer's options; its ``starting_step`` is replaced by the step of a checkpoint.
        with_checkpoints: True if the run writes checkpoints before its end.
        watch: called while waiting; raises if waiting has become useless.
        first_word_s: seconds after which a wait is explained for the first time.
    """

    client: RolloutApiClient
    _: KW_ONLY
    registration: Registration
    conversion: Conversion
    wait_s: float
    with_checkpoints: bool = False
    missing_logprobs: MissingLogprobs = "warn"
    watch: Watch = lambda: None
    first_word_s: float = _FIRST_WORD_S

    def __post_init__(self) -> None:
        self._trainer: TrainerRegistration | None = None
        self._step = self.registration.starting_step
        self._current: tuple[Delivery, list[Group]] | None = None
        self._trained: dict[int, str] = {}  # batches trained on and not acknowledged, with the digest of each
        self._safe: set[int] = set()  # those of them that may be acknowledged
        self._in_checkpoint: set[int] = set()  # and those that may be once the checkpoint is written
        self._received = 0
        self._counts: Counter[str] = Counter()
        self._said: set[str] = set()
        self._names: dict[int, str | None] = {}

    def next_groups(self, count: int, *, deadline: Deadline) -> list[Group]:
        """Return the usable groups of the next batch, however many: batches are counted in sequences, not by ``count``.

        Raises:
            DeadlineExceeded: the environments did not fill a batch in time, or the API does not answer.
            EngineError: another trainer has registered.
            LachesisError: raised by ``watch``, such as StopRequested. The state is as before the call.
            DataError: ten batches in a row had no group that could be trained on, or groups have no logprobs.
        """
        name = f"the trainer's wait for a batch of {self.registration.batch_size} {FROM_OTHERS} {self.client.url}"
        deadline = nested_deadline(name, deadline, self.wait_s, "source.wait_s")
        if self._current is not None:  # the run trained on nothing in it
            return self._current[1]
        self._acknowledge_safe(deadline)
        reasons: list[str] = []
        while len(reasons) < _MOST_UNUSABLE_BATCHES:
            with deadline.waiting():
                delivery = self._wait_for_batch(deadline)
            if self._is_known(delivery):
                self._acknowledge_safe(deadline)
                continue
            groups, unusable = self._convert(delivery)
            if groups:
                self._check_size(delivery)
                self._current = delivery, groups
                return groups
            reasons += unusable[-1:]
            self._finish(delivery)
        raise DataError(
            f"{len(reasons)} batches in a row had no group that can be trained on; the last one because {reasons[-1]}",
            remedy="correct the environment; `lachesis run-api --strict` keeps such groups out of batches",
        )

    def _wait_for_batch(self, deadline: Deadline) -> Delivery:
        """Poll until there is a batch, and register if the API does not know this trainer.

        The limit counts from the last group that entered the queue.
        """
        retry = Retry(deadline, first_s=_FIRST_PAUSE_S, longest_s=_LONGEST_PAUSE_S)
        waited, said_at, most = Deadline("", None), self.first_word_s, -1
        while True:
            self.watch()
            trainer = self._trainer or self._register(deadline)
            try:
                delivery, waiting = self.client.next_batch(trainer, holds=self._trained, deadline=deadline)
            except TrainerNotRegistered as error:
                logger.warning("%s; the groups that it had queued are lost; registering again", error.message)
                self._trainer = None
                deadline.check(error.message)
                continue
            if delivery is not None:
                return delivery
            queued = self.client.queued(deadline=deadline)
            if queued > most >= 0:
                deadline.progressed()
            most = max(most, queued)
            if waited.elapsed_s() >= said_at:
                said_at = waited.elapsed_s() + _REPEAT_S
                self._explain(waiting, waited.elapsed_s())
            time.sleep(retry.after(waiting))

    def _explain(self, waiting: str, seconds: float) -> None:
        size, url = self.registration.batch_size, self.client.url
        situation = self.client.situation(batch_size=size)
        reason = situation if not waiting or "no environment" in situation else waiting
        logger.warning(f"waiting for {seconds:.0f} s for a batch of {size} sequences from {url}: {reason}")

    def _register(self, deadline: Deadline) -> TrainerRegistration:
        asked = self.registration.model_copy(update={"starting_step": self._step})
        self._trainer = trainer = self.client.register(asked, deadline=deadline)
        # Ids of an API that was restarted without its state mean other batches.
        self._trained = {number: digest for number, digest in self._trained.items() if number in trainer.outstanding}
        self._safe &= self._trained.keys()
        url, protocol = self.client.url, "" if trainer.acknowledges else ", plain protocol"
        facts = f"step {self._step}, batches of {asked.batch_size} sequences{protocol}"
        logger.info("[Trainer] ✓ Registered with Atropos API at %s (%s)", url, facts)
        if asked.starting_step == 0 and (queued := self.client.queued(deadline=deadline)):
            logger.warning(
                f"the rollout API at {url} holds {queued} groups from before this run, which it will train on first; "
                f"to begin without them, stop their environments and empty the queue: curl {url}/reset_data"
            )
        return trainer

    def _is_known(self, delivery: Delivery) -> bool:
        """Return True if a checkpoint includes this batch, so that it may be acknowledged."""
        number = delivery.batch_id
        if number is None or self._trained.get(number) != _digest(delivery):
            return False
        self._safe.add(number)
        self._counts["batches_known"] += 1
        return True

    def _convert(self, delivery: Delivery) -> tuple[list[Group], list[str]]:
        """Return the usable groups, and the reasons of the others."""
        groups, reasons = [], []
        number = self._received if delivery.batch_id is None else delivery.batch_id
        self._received += 1
        for index, data in enumerate(delivery.groups):
            try:
                group = convert_group(
                    data,
                    group_id=f"{number}-{index}",
                    conversion=self.conversion,
                    environment=self._registered_name(data.get("env_id")),
                )
            except Unusable as error:
                reasons.append(error.message)
                self._say_once(f"a group of {self._name(data.get('env_id'))} was set aside: {error.message}")
                continue
            self._check_logprobs(data)
            groups.append(group)
        self._counts["dropped_groups"] += len(reasons)
        return groups, reasons

    def _check_size(self, delivery: Delivery) -> None:
        wanted, sizes = self.registration.batch_size, [len(group.get("tokens", ())) for group in delivery.groups]
        if len(sizes) == 1 and sizes[0] > wanted:
            self._say_once(
                f"a group of {sizes[0]} sequences is larger than the batch of {wanted} that was requested, and is a "
                "step's whole batch; source.batch_size (--batch-size x --gradient-accumulation-steps) sets the size"
            )

    def _check_logprobs(self, data: Mapping[str, Any]) -> None:
        if data.get("inference_logprobs"):
            return
        what = f"{self._name(data.get('env_id'))} sends no inference_logprobs"
        remedy = "have it sample by its managed server, with --openai.server_type vllm"
        if self.missing_logprobs == "error":
            raise DataError(f"{what}, but source.missing_logprobs is error", remedy=remedy)
        self._counts["groups_without_logprobs"] += 1
        self._say_once(f"{what}: the trainer uses its own instead, as if the samples were on-policy; {remedy}")

    def _name(self, env_id: object) -> str:
        """Return an environment's name for a sentence that is logged once."""
        if not isinstance(env_id, int):
            return "an environment that has not registered"
        return f"environment {self._registered_name(env_id) or env_id}"

    def _registered_name(self, env_id: object) -> str | None:
        """Return the name that the API gave an environment, asked once for each; the original API has no names."""
        if not isinstance(env_id, int):
            return None
        if env_id not in self._names:
            self._names = {env_id: None, **self._names, **dict(enumerate(self.client.environment_names()))}
        return self._names[env_id]

    def _say_once(self, line: str) -> None:
        """Log a sentence once, whatever its numbers."""
        kind = "".join(letter for letter in line if not letter.isdigit())
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("%s (further ones are counted, not shown)", line)

    def _finish(self, delivery: Delivery) -> None:
        """Note that a batch was trained on. It is safe at once if no checkpoint will come to hold it."""
        number = delivery.batch_id
        if number is None or self._trainer is None or not self._trainer.acknowledges:
            return
        self._trained[number] = _digest(delivery)
        if not self.with_checkpoints:
            self._safe.add(number)

    def _acknowledge_safe(self, deadline: Deadline) -> None:
        if self._trainer is None or not self._safe:
            return
        try:
            self.client.acknowledge(self._trainer, sorted(self._safe), deadline=deadline)
        except Replaced:
            # Or the API was restarted, which the next request for a batch will show.
            logger.warning("the rollout API at %s does not know this trainer any more", self.client.url)
        for number in self._safe:
            self._trained.pop(number, None)
        self._safe.clear()

    def report_version(self, version: int) -> None:
        """Finish the batch after its optimizer step: it is acknowledged now or with the next checkpoint."""
        self._step = version
        current, self._current = self._current, None
        if current is not None:
            self._finish(current[0])
        self._try_to_acknowledge()

    def complete(self) -> None:
        """Acknowledge all trained batches; before this, a killed trainer would need them again."""
        current, self._current = self._current, None
        if current is not None:  # not used as often as it could have been
            self._finish(current[0])
        self._safe.update(self._trained)
        self._try_to_acknowledge()

    def _try_to_acknowledge(self) -> None:
        deadline = Deadline(f"the acknowledgement of batches to {self.client.url}", _ACKNOWLEDGE_S)
        try:
            self._acknowledge_safe(deadline)
        except (DeadlineExceeded, StopRequested) as error:  # tried again before the next request for a batch
            logger.warning("%s", error.message)

    def counters(self) -> dict[str, float]:
        """Return counts since the last call.

        ``dropped_groups`` (set aside), ``groups_without_logprobs``, and ``batches_known``: those that came again
        although a checkpoint includes them.
        """
        counts, self._counts = self._counts, Counter()
        names = ("dropped_groups", "groups_without_logprobs", "batches_known")
        return {name: float(counts[name]) for name in names}

    def state_dict(self) -> dict[str, Any]:
        """Return the step, and the batches that the current weights have seen and that are not acknowledged.

        These may be acknowledged once the state is :meth:`saved`.
        """
        trained = dict(self._trained)
        if self._current is not None and self._current[0].batch_id is not None:
            # A batch that is used several times is in the checkpoint itself.
            trained[self._current[0].batch_id] = _digest(self._current[0])
        self._in_checkpoint = set(self._trained)
        return {"step": self._step, "trained": {str(number): digest for number, digest in trained.items()}}

    def saved(self) -> None:
        """Mark the checkpoint's batches as safe; the API is told before the next batch is requested."""
        self._safe |= self._in_checkpoint & self._trained.keys()
        self._in_checkpoint = set()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state before the first batch; the trainer registers at that step."""
        self._step = int(state["step"])
        self._trained = {int(number): str(digest) for number, digest in state["trained"].items()}

    def close(self) -> None:
        """Leave, and close the connections. Batches that are not acknowledged go to the next trainer. Idempotent."""
        trainer, self._trainer = self._trainer, None
        if trainer is not None and trainer.acknowledges:
            self.client.leave(trainer, limit_s=_GOODBYE_S)
        self.client.close()


@dataclass(eq=False)
class EngineWatch:
    """Watcher, called repeatedly while a batch is awaited, which checks the engine at intervals.

    Checks are not awaited: one of several servers that hangs is given up after minutes, and others fill batches.
    """

    engine: Engine
    every_s: float = _LOOK_EVERY_S
    _looked: float = field(default_factory=time.monotonic, init=False)
    _look: Future[EngineHealth] | None = field(default=None, init=False)
    _called: float = field(default=0.0, init=False)
    _said: str = field(default="", init=False)

    def __call__(self) -> None:
        """Raise EngineError if the engine is gone or was replaced; of several servers one is enough."""
        before, self._called = self._called, time.monotonic()
        if self._called - before > _LOOK_EVERY_S:  # findings of an earlier wait are out of date
            self._look = None
        if self._look is None and time.monotonic() - self._looked >= self.every_s:
            self._look = begin(self.engine.health, name="lachesis-engine-watch")
        if self._look is None or not self._look.done():
            return
        health, self._look, self._looked = self._look.result(), None, time.monotonic()
        if health.others_serve:
            if health.detail != self._said:
                logger.warning("environments generate with the remaining engines: %s", health.detail)
            self._said = health.detail
        elif not health.ready and not health.paused:
            raise EngineError(
                f"the environments cannot generate: {health.detail}",
                remedy="see the engine's log, restart it and resume with --resume",
            )


def build_atropos_source(
    config: LachesisConfig,
    *,
    conversion: Conversion,
    checkpoint_dir: str,
    watch: Watch = lambda: None,
    reachable: bool = True,
) -> AtroposSource:
    """Build the source of the section ``source`` with kind atropos.

    Args:
        config: of the run.
        conversion: of its groups.
        checkpoint_dir: reported to the environments.
        watch: called while it waits; raises if waiting has become useless.
        reachable: require that the API answers now; False if the run will start it.

    Raises:
        EngineError: it does not answer.
    """
    section = config.source
    assert isinstance(section, AtroposSourceConfig), "of source.kind atropos"
    steps = config.run.steps
    assert steps is not None, "config.rules checks it"
    every, wandb = config.checkpoint_interval, config.logging.wandb
    client = RolloutApiClient(section.url, watch=watch)
    if reachable:
        client.require(limit_s=_REACH_S)
    return AtroposSource(
        client,
        registration=Registration(
            batch_size=section.batch_size or config.batch.prompts_per_step * config.sampling.num_generations,
            max_token_len=section.max_sequence_length,
            checkpoint_dir=checkpoint_dir,
            save_checkpoint_interval=every or steps,
            starting_step=0,
            num_steps=steps,
            wandb_project=wandb.project if wandb else "",
            wandb_group=(wandb.group or "") if wandb else "",
        ),
        conversion=conversion,
        wait_s=section.wait_s,
        with_checkpoints=every > 0,
        missing_logprobs=section.missing_logprobs,
        watch=watch,
    )


def keep_given_advantages(
    assign: Callable[[Sequence[Group]], list[Group]],
) -> Callable[[Sequence[Group]], list[Group]]:
    """Return ``assign`` wrapped so that advantages from environments override its own."""

    def assign_others(groups: Sequence[Group]) -> list[Group]:
        return [_restored(before, after) for before, after in zip(groups, assign(groups), strict=True)]

    return assign_others


def _restored(before: Group, after: Group) -> Group:
    samples = tuple(
        new if old.advantage is None else replace(new, advantage=old.advantage)
        for old, new in zip(before.samples, after.samples, strict=True)
    )
    return replace(after, samples=samples)


def _digest(delivery: Delivery) -> str:
    """Return a digest of a batch's identifying content."""
    content = json.dumps([[group.get("tokens"), group.get("scores")] for group in delivery.groups])
    return hashlib.blake2b(content.encode(), digest_size=12).hexdigest()
