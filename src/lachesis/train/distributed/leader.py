"""Leader (rank 0), which announces turns and collects the followers' results, and its policy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lachesis.bridges.broadcast import travelling
from lachesis.bridges.senders import exhaust
from lachesis.common.deadline import Deadline
from lachesis.common.errors import DeadlineExceeded, EngineError, LachesisError, TrainingError, first_line
from lachesis.engines.serving.backend import TransferKind
from lachesis.metrics.names import TRAINING_OF
from lachesis.metrics.values import Mean, MetricValue, merge_metrics
from lachesis.train.batch import Batch, collect, deal, split
from lachesis.train.distributed.control import ControlGroup, Gone, Tag
from lachesis.train.distributed.messages import Alive, Answer, Ended, Failed, Turn
from lachesis.train.distributed.rank_sending import SendsWeights
from lachesis.train.distributed.sharded_checkpoint import Written
from lachesis.train.policy import Policy
from lachesis.transport.layout import plan_buckets
from lachesis.transport.partners import PartnerLine, SendPacked

# Turns that are not methods of a policy: the first, which builds it from a configuration, and the last.
BUILD = "build"
END = "end"
# Seconds between two signs of life; seconds that news of a failure may take; seconds by which news of a death may come
# after news of its effects; seconds that a collective has to end by itself once a rank is gone.
_BEAT_S = 5.0
_NEWS_S = 5.0
_SETTLE_S = 0.2
_ABORT_S = 1.0


class Leader:
    """Leader of the ranks, as its policy sees it.

    Args:
        control: all ranks.
        abort: ends collectives that wait for a lost rank, which torch does not notice by itself.

    Attributes:
        broken: a turn has failed, so that followers may be stuck in it.
    """

    def __init__(self, control: ControlGroup, *, abort: Callable[[], None]) -> None:
        self.broken = False
        self._control = control
        self._abort = abort
        self._followers = range(1, control.size)
        self._number = 0
        self._lock = threading.Lock()
        self._idle = threading.Event()
        self._idle.set()
        self._troubles: dict[int, LachesisError] = {}
        self._trouble = threading.Event()
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._watch, args=(rank,), daemon=True) for rank in self._followers]
        for thread in (*self._threads, threading.Thread(target=self._beat, daemon=True)):
            thread.start()

    @property
    def turns(self) -> int:
        """Return the number of turns announced."""
        return self._number

    def check(self) -> None:
        """Raise any known failure of a follower, also between turns."""
        if self._trouble.is_set():
            raise self._explained(None, "a pause between two turns")

    @contextmanager
    def turn(
        self,
        method: str,
        *arguments: Any,
        what: str,
        parts: Sequence[Any] | None = None,
        answers: bool = False,
    ) -> Iterator[list[Any]]:
        """Announce a turn: followers call ``method`` of their policies while the block runs; after it all are done.

        Args:
            arguments: of the method, for all followers.
            what: names the turn in errors.
            parts: one argument for each follower, in the order of ranks, instead of ``arguments``.
            answers: collect the results of the followers' methods, in the order of ranks, in the list that is yielded.

        Raises:
            TrainingError: a follower failed or is gone. DeadlineExceeded: it took too long.
        """
        collected: list[Any] = []
        with self._lock:
            self._idle.clear()
            try:
                turn = Turn(self._number, method, arguments, parts=parts is not None, answers=answers)
                self._number += 1
                if self._trouble.is_set():
                    raise Gone("a rank has already ended")
                self._control.broadcast(turn)
                for rank, part in zip(self._followers, parts or (), strict=parts is not None):
                    self._control.send(part, to=rank, tag=Tag.PART)
                yield collected
                values = [self._answer(rank, turn, what) for rank in self._followers]
                collected += values if answers else ()
            except LachesisError as error:
                self.broken = True
                if not isinstance(error, Gone):
                    raise
                raise self._explained(error, what) from error
            except Exception as error:
                self.broken = True
                raise self._explained(error, what) from error
            finally:
                self._idle.set()

    def close(self) -> None:
        """Tell followers that the run is over, and wait for their reply. Idempotent."""
        if self._ended.is_set():
            return
        self._ended.set()
        with suppress(RuntimeError):  # gloo's, if one of them is gone; the others learn it from the next message
            self._control.broadcast(Turn(self._number, END))
        self._tell_all(Ended())
        deadline = Deadline("the leader waiting for its followers' end", _NEWS_S)
        for thread in self._threads:
            thread.join(deadline.remaining_s())

    def tell(self, message: Any) -> None:
        """Send a message to all followers during a turn that needs more than its announcement.

        Raises Gone.
        """
        for rank in self._followers:
            self._control.send(message, to=rank, tag=Tag.BUCKET)

    def hear(self) -> Sequence[Any]:
        """Return each follower's next message during a turn, in the order of ranks.

        Raises Gone, DeadlineExceeded.
        """
        return [self._await(rank, Tag.BUCKET, "sending weights") for rank in self._followers]

    def _answer(self, rank: int, turn: Turn, what: str) -> Any:
        answer = self._await(rank, Tag.ANSWER, what)
        if not isinstance(answer, Answer) or answer.number != turn.number:
            raise TrainingError(
                f"{self._control.name(rank)} answered {answer} to turn {turn.number} ({turn.method})",
                remedy="start all ranks with the same version of lachesis",
            )
        return answer.value

    def _await(self, rank: int, tag: Tag, what: str) -> Any:
        name = f"{self._control.name(rank)} doing its part of {what}"
        deadline = Deadline(name, self._control.limit_s, "deadlines.ranks_s")
        with deadline.waiting():
            return self._control.receive(rank, tag=tag, deadline=deadline)

    def _explained(self, error: Exception | None, what: str) -> Exception:
        """Return the error to raise for a failure of the leader's part: the follower's error that caused it, if any."""
        if self._trouble.wait(_NEWS_S):
            time.sleep(_SETTLE_S)
        # A rank that is gone makes others fail.
        troubles = sorted(self._troubles.values(), key=lambda trouble: not isinstance(trouble, Gone))
        cause = next(iter(troubles), error)
        assert cause is not None
        if of_a_collective(cause):
            return TrainingError(
                f"the ranks lost contact during {what}: {first_line(cause)}",
                remedy="check if one of them hangs; they wait deadlines.ranks_s seconds for one another",
            )
        if not isinstance(cause, LachesisError):
            return cause
        return TrainingError(f"{cause.message}, during {what}", remedy=cause.remedy)

    def _watch(self, rank: int) -> None:
        """Watch for the end of a follower while the main thread waits elsewhere."""
        try:
            news = self._control.receive(rank, tag=Tag.LIFE)
        except TrainingError as error:
            trouble: LachesisError = error
        else:
            if not isinstance(news, Failed):
                return
            trouble = TrainingError(f"{self._control.name(rank)}: {news.message}", remedy=news.remedy)
        if self._ended.is_set():
            return
        self._troubles[rank] = trouble
        self._trouble.set()
        self._tell_all(Ended())  # ranks that wait for the lost one in a collective would wait for long
        if not self._idle.wait(_ABORT_S):
            self._abort()

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_S):
            self._tell_all(Alive())

    def _tell_all(self, news: Alive | Ended) -> None:
        for rank in self._followers:
            with suppress(Gone):
                self._control.send(news, to=rank, tag=Tag.LIFE)


def of_a_collective(error: Exception) -> bool:
    """Return True if torch's collectives raised the error; gloo's errors have no type that says so."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


class LeadingPolicy(Policy, SendsWeights):
    """Policy of the leader, whose joint calls include the followers.

    Each method that all ranks must call together is overridden here, in a turn, and named nowhere else. Like a
    :class:`Policy`, it serves one thread at a time.

    Args:
        *args, **options: of :class:`Policy`, on all ranks the same.
        leader: announces its turns.
    """

    def __init__(self, *args: Any, leader: Leader, **options: Any) -> None:
        super().__init__(*args, **options)
        self._leader = leader
        self._mesh = self.strategy.mesh
        self._names = {id(parameter): name for name, parameter in self.model.named_parameters()}

    def _parts_of(self, batch: Batch) -> list[Batch]:
        """Return each rank's part of the batch, with the followers' micro-batches made; groups stay with the leader."""
        first, *others = self._mesh.of_ranks(split(batch, self._mesh.parts))
        return [first, *(replace(part, groups=(), micro_batches=tuple(part.micro_batches)) for part in others)]

    def accumulate(self, batch: Batch) -> dict[str, MetricValue]:
        """Run :meth:`Policy.accumulate` on the whole batch; metrics are over all ranks."""
        own, *others = self._parts_of(batch)
        with self._leader.turn("accumulate", what="forward and backward", parts=others, answers=True) as answers:
            began = time.perf_counter()
            metrics = super().accumulate(own)
            time_of_this = {f"{TRAINING_OF}0": Mean(time.perf_counter() - began)}
        ranks = [metrics | time_of_this, *answers]
        # Ranks that share a part have equal metrics, except for their times.
        beside = [
            {name: value for name, value in answer.items() if name.startswith(TRAINING_OF)}
            for rank, answer in enumerate(ranks)
            if rank % self._mesh.context
        ]
        return merge_metrics([*self._mesh.of_parts(ranks), *beside])

    def step(self) -> dict[str, MetricValue]:
        with self._leader.turn("step", what="the optimizer step"):
            return super().step()

    def canary(self, token_ids: Sequence[int]) -> list[float]:
        if not self.strategy.together:
            return super().canary(token_ids)
        with self._leader.turn("canary", tuple(token_ids), what="reading the canary"):
            return super().canary(token_ids)

    def recompute_logprobs(self, batch: Batch) -> Batch:
        return self._scored_by_all(batch, super().recompute_logprobs, what="computing old logprobs")

    def score_reference(self, batch: Batch) -> Batch:
        return self._scored_by_all(batch, super().score_reference, what="computing the reference's logprobs")

    def _scored_by_all(self, batch: Batch, score: Callable[[Batch], Batch], *, what: str) -> Batch:
        own, *others = self._parts_of(batch)
        with self._leader.turn(score.__name__, what=what, parts=others, answers=True) as answers:
            first = score(own)
        parts = [part.micro_batches for part in self._mesh.of_parts([first, *answers])]
        return replace(batch, micro_batches=tuple(collect(parts)))

    def digest_shares(self) -> list[dict[str, int]]:
        with self._leader.turn("digest_shares", what="proving the weights", answers=True) as answers:
            own = super().digest_shares()
        return [*own, *chain.from_iterable(answers)]

    def whole(self, parameters: Sequence[Tensor]) -> Iterator[Tensor]:
        if not self.strategy.sharded:
            return super().whole(parameters)
        return self.full_parameters([self._names[id(parameter)] for parameter in parameters])

    def pack_buckets(self, kind: TransferKind, saved: bool, bucket_bytes: int, anew: bool, *, send: SendPacked) -> None:
        """Call ``send`` while all ranks pack each bucket of an update where an engine's worker reads it.

        Args:
            kind: all weights, or an adapter's.
            saved: under the names of a checkpoint.
            bucket_bytes: as :meth:`Channel.send` is given it.
            anew: the places of the followers' buckets are unknown yet.

        Raises:
            EngineError, DeadlineExceeded: as ``send``; all ranks are done with the update then, too.
        """
        source = travelling(kind, super().whole)
        buckets = plan_buckets(source.specs(self, saved), limit_bytes=bucket_bytes)
        failure: EngineError | DeadlineExceeded | None = None
        with self._leader.turn("pack_buckets", kind, saved, bucket_bytes, anew, what="sending weights"):
            tensors = iter(source.tensors(self, saved))
            partners = PartnerLine(self._leader, left=len(buckets))
            try:
                send(tensors, partners)
            except (EngineError, DeadlineExceeded) as error:  # an error of the engine: the ranks are fine
                partners.stop()
                exhaust(tensors)
                failure = error
        if failure is not None:
            raise failure

    def make_room(self) -> None:
        if self._leader.broken:  # the run is ending, but its engine should still be able to wake up
            super().make_room()
            return
        with self._leader.turn("make_room", what="releasing unused GPU memory"):
            super().make_room()

    def full_parameters(self, names: Sequence[str]) -> Iterator[Tensor]:
        with self._leader.turn("full_parameters", names, what=f"gathering {len(names)} parameters"):
            stream = super().full_parameters(names)
            try:
                yield from chain(stream)  # a chain, because the stream itself would be closed with this generator
            except GeneratorExit:
                exhaust(stream)  # the caller has stopped early, but the other ranks still gather

    # The method that followers run within :meth:`others`; the leader's bridge does the leader's part.
    send_share = SendsWeights.send_share

    @contextmanager
    def others(self, step: str, told: Mapping[str, Any]) -> Iterator[list[Any]]:
        with self._leader.turn("send_share", step, told, what="a transfer of the weights", answers=True) as answers:
            yield answers

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        with self._leader.turn("load_weights", _shapes(dict(tensors)), what="loading weights"):
            super().load_weights(tensors)

    def optimizer_state(self) -> dict[str, Any]:
        if not self.strategy.sharded:
            return super().optimizer_state()
        with self._leader.turn("optimizer_state", what="gathering the optimizer's state"):
            return super().optimizer_state()

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        told = {**state, "parts": _shapes(state["parts"])} if self.strategy.sharded else state
        with self._leader.turn("load_optimizer_state", told, what="loading the optimizer's state"):
            super().load_optimizer_state(state)

    def reference_state(self) -> dict[str, Tensor]:
        if self.reference is None or not self.strategy.sharded:
            return super().reference_state()
        with self._leader.turn("reference_state", what="gathering the reference"):
            return super().reference_state()

    def reserve_copies(self) -> None:
        with self._leader.turn("reserve_copies", what="taking memory for checkpoints"):
            super().reserve_copies()

    def begin_parts(self, directory: str, copied: bool) -> dict[str, Any]:
        with self._leader.turn("begin_parts", directory, copied, what="beginning a checkpoint"):
            return super().begin_parts(directory, copied)

    def parts_written(self) -> bool:
        if not super().parts_written():
            return False
        with self._leader.turn("parts_written", what="writing a checkpoint", answers=True) as answers:
            pass
        return all(answers)

    def finish_parts(self) -> list[Written]:
        with self._leader.turn("finish_parts", what="finishing a checkpoint"):
            return super().finish_parts()

    def load_parts(self, directory: str, state: Mapping[str, Any]) -> None:
        with self._leader.turn("load_parts", directory, state, what="reading a checkpoint"):
            super().load_parts(directory, state)

    def load_old_logprobs(self, held: list[Tensor]) -> None:
        own, *others = self._mesh.of_ranks(_dealt_evenly(held, self._mesh.parts))
        with self._leader.turn("load_old_logprobs", what="loading old logprobs", parts=others):
            super().load_old_logprobs(own)

    def sees(self, path: str) -> bool:
        with self._leader.turn("sees", path, what="looking for a file", answers=True) as answers:
            own = super().sees(path)
        return own and all(answers)

    def old_logprobs(self) -> list[Tensor]:
        """Return :meth:`Policy.old_logprobs` in the order of the batch's micro-batches."""
        with self._leader.turn("old_logprobs", what="gathering old logprobs", answers=True) as answers:
            own = super().old_logprobs()
        # Idle passes are at the end, and have none.
        return [tensor for tensor in collect(self._mesh.of_parts([own, *answers])) if tensor.numel()]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        reference = _shapes(state["reference"])
        own, *others = self._mesh.of_ranks(_dealt_evenly(state["old_logprobs"], self._mesh.parts))
        parts = [{**state, "reference": reference, "old_logprobs": part} for part in others]
        with self._leader.turn("load_state_dict", what="loading the policy's state", parts=parts):
            super().load_state_dict({**state, "old_logprobs": own})


# The methods that a turn may name.
METHODS = frozenset(name for name in vars(LeadingPolicy) if not name.startswith("_"))


def _shapes(state: Any) -> Any:
    """Return the state with meta tensors for those that ranks get by collectives; scalars stay."""
    return tree_map_only(
        Tensor, lambda tensor: torch.empty_like(tensor, device="meta") if tensor.ndim else tensor, state
    )


def _dealt_evenly(held: Sequence[Tensor], number: int) -> list[list[Tensor]]:
    """Return old logprobs by part of a batch, with those of idle passes where a part has fewer micro-batches."""
    parts = [list(part) for part in deal(held, number)]
    passes = len(parts[0])
    return [part + [torch.empty(0)] * (passes - len(part)) for part in parts]
