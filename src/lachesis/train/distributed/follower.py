"""Followers: ranks that take each announced turn with their own policy, until the leader ends the run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

import torch

from lachesis.bridges.broadcast import travelling
from lachesis.bridges.senders import exhaust
from lachesis.common.deadline import Deadline
from lachesis.common.errors import DeadlineExceeded, LachesisError, TrainingError, first_line
from lachesis.engines.serving.backend import TransferKind
from lachesis.metrics.names import TRAINING_OF
from lachesis.metrics.values import Mean, MetricValue
from lachesis.train.batch import Batch
from lachesis.train.distributed.control import ControlGroup, Gone, Tag
from lachesis.train.distributed.leader import BUILD, END, METHODS, of_a_collective
from lachesis.train.distributed.messages import Alive, Answer, Ended, Failed, Turn
from lachesis.train.distributed.rank_sending import SendsWeights
from lachesis.train.policy import Policy
from lachesis.transport.partners import pack_beside
from lachesis.transport.transports import SharedRoom

# Seconds that a wait for the leader has to end by itself once the leader is gone, and that news of its end may take.
_GRACE_S = 1.0
_NEWS_S = 5.0


class ToldLeader(TrainingError):
    """Error on this rank that the leader knows and reports."""

    def __init__(self, failure: LachesisError) -> None:
        super().__init__(failure.message, remedy=failure.remedy)
        self.exit_code = failure.exit_code


class FollowingPolicy(Policy, SendsWeights):
    """Policy of a follower, which also reports how long a turn took.

    Args:
        *args, **options: of :class:`Policy`.
        control: all ranks.
        room: memory where an engine's worker on this rank's device reads weights.
    """

    def __init__(self, *args: Any, control: ControlGroup, room: SharedRoom, **options: Any) -> None:
        super().__init__(*args, **options)
        self._control = control
        self._room = room

    def accumulate(self, batch: Batch) -> dict[str, MetricValue]:
        began = time.perf_counter()
        metrics = super().accumulate(batch)
        return {**metrics, f"{TRAINING_OF}{self._control.rank}": Mean(time.perf_counter() - began)}

    def pack_buckets(self, kind: TransferKind, saved: bool, bucket_bytes: int, anew: bool) -> None:
        """Pack this rank's part of :meth:`LeadingPolicy.pack_buckets`."""
        if anew:
            self._room.close()
        source = travelling(kind, self.whole)
        tensors, specs = source.tensors(self, saved), source.specs(self, saved)
        pack_beside(tensors, specs, bucket_bytes=bucket_bytes, room=self._room, line=_LeaderLine(self._control))


@dataclass(frozen=True, slots=True)
class _LeaderLine:
    """Connection to the leader during a turn."""

    control: ControlGroup

    def tell(self, message: Any) -> None:
        self.control.send(message, to=0, tag=Tag.BUCKET)

    def hear(self) -> Sequence[Any]:
        return (self.control.receive(0, tag=Tag.BUCKET),)


class Follower:
    """Rank that follows the leader's turns.

    Args:
        control: all ranks.
        build: makes the policy of a configuration (as plain data), and gives the run's seed.
        end_process: last resort if the leader is gone and a collective still waits for it.
    """

    def __init__(
        self,
        control: ControlGroup,
        *,
        build: Callable[[Mapping[str, Any]], tuple[Policy, int]],
        end_process: Callable[[LachesisError], None],
    ) -> None:
        self._control = control
        self._build = build
        self._end_process = end_process
        self._policy: Policy | None = None
        self._seed = 0
        self._lost: LachesisError | None = None
        self._leader_ended = threading.Event()
        self._done = threading.Event()

    def follow(self) -> None:
        """Take every turn up to the last.

        Raises:
            ToldLeader: this rank failed, perhaps because of another.
            Gone: the leader is gone.
            DeadlineExceeded: the leader gave no sign of life.
        """
        watch = threading.Thread(target=self._watch, daemon=True)
        watch.start()
        try:
            for number in count():
                turn: Turn = self._control.broadcast()
                self._require(turn, number)
                if turn.method == END:
                    return
                value = self._take(turn)
                self._control.send(Answer(number, value if turn.answers else None), to=0, tag=Tag.ANSWER)
        except Exception as error:
            raise self._explained(error) from error
        finally:
            self._done.set()
            watch.join(_NEWS_S)  # the interpreter must not end while a thread is within gloo

    def _require(self, turn: Turn, number: int) -> None:
        if turn.number != number:
            raise TrainingError(
                f"it is at turn {number}, but the leader is at turn {turn.number} ({turn.method})",
                remedy="start all ranks with the same version of lachesis",
            )
        if turn.method not in {BUILD, END, *METHODS}:
            raise TrainingError(
                f"turn {number} is {turn.method}, which this rank does not know",
                remedy="start all ranks with the same version of lachesis",
            )

    def _take(self, turn: Turn) -> Any:
        arguments = (self._control.receive(0, tag=Tag.PART),) if turn.parts else turn.arguments
        if turn.method == BUILD:
            self._policy, self._seed = self._build(*arguments)
            return None
        assert self._policy is not None, "the first turn is to build it"
        # Ranks drop other units of an adapter; no state has to be kept for it.
        torch.manual_seed(hash((self._seed, self._control.rank, self._policy.optimizer.steps_taken)) % 2**63)
        value = getattr(self._policy, turn.method)(*arguments)
        if isinstance(value, Iterator):  # the leader uses its results; this rank only takes part
            exhaust(cast(Iterator[Any], value))
            return None
        return value

    def _explained(self, error: Exception) -> LachesisError:
        """Return the error to raise, once the leader knows or is known to be gone."""
        if isinstance(error, Gone) or of_a_collective(error):
            self._leader_ended.wait(_NEWS_S)  # the leader is gone, or about to say that another is
        if self._lost is not None:
            return self._lost
        if isinstance(error, LachesisError):
            failure = error
        else:
            failure = TrainingError(
                f"its part failed: {type(error).__name__}: {first_line(error)}",
                remedy="run `lachesis --traceback train ...` to see where",
            )
        if not self._leader_ended.is_set():
            try:
                self._control.send(Failed(failure.message, failure.remedy), to=0, tag=Tag.LIFE)
            except Gone as gone:
                return gone
        return ToldLeader(failure)

    def _watch(self) -> None:
        """Watch for the leader's end while the main thread waits elsewhere."""
        try:
            while isinstance(self._hear(), Alive):
                pass
            self._control.send(Ended(), to=0, tag=Tag.LIFE)
        except (TrainingError, DeadlineExceeded) as error:
            self._lost = error
        self._leader_ended.set()
        if not self._done.wait(_GRACE_S):
            self._end_process(self._lost or ToldLeader(TrainingError("the leader has ended")))

    def _hear(self) -> Any:
        name = f"rank {self._control.rank} waiting for a sign of life of {self._control.name(0)}"
        return self._control.receive(0, tag=Tag.LIFE, deadline=Deadline(name, self._control.limit_s))
