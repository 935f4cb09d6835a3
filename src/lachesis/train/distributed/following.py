"""The other ranks: receive a command, take part, until the leader says that the run is over."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lachesis.common.deadline import Deadline
from lachesis.common.errors import DeadlineExceeded, LachesisError, TrainingError
from lachesis.train.distributed import commands
from lachesis.train.distributed.links import Gone, Link
from lachesis.train.policy import Policy

# Before the leader has said how long ranks wait for one another.
FIRST_LIMIT_S = 600.0
# Seconds that a collective gets to end by itself once the leader is gone.
_GRACE_S = 10.0


class ToldLeader(TrainingError):
    """What went wrong here, which the leader has heard of and says."""

    def __init__(self, failure: LachesisError) -> None:
        super().__init__(failure.message, remedy=failure.remedy)
        self.exit_code = failure.exit_code


class Follower:
    """One rank of a run that another leads.

    Args:
        link: to the leader.
        rank: this one's.
        build: makes the policy of a configuration, and says how long ranks wait for one another and the run's seed.
        end_process: the last resort where the leader is gone and a collective goes on waiting for it.
    """

    def __init__(
        self,
        link: Link,
        *,
        rank: int,
        build: Callable[[Mapping[str, Any]], tuple[Policy, float, int]],
        end_process: Callable[[LachesisError], None],
    ) -> None:
        self._link = link
        self._rank = rank
        self._build = build
        self._end_process = end_process
        self._limit_s = FIRST_LIMIT_S
        self._seed = 0
        self._policy: Policy | None = None
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()

    def follow(self) -> None:
        """Take part until the leader says :class:`commands.End`.

        Raises:
            ToldLeader: this rank could not do its part.
            Gone: the leader is gone.
            DeadlineExceeded: the leader gave no sign of life.
        """
        threading.Thread(target=self._read, daemon=True).start()
        while True:
            command = self._next()
            if isinstance(command, commands.End):
                return
            self._idle.clear()
            try:
                answer = self._perform(command)
            except Exception as error:
                raise self._failed(error, command) from error
            self._idle.set()
            self._link.send(commands.Done(answer))

    def _next(self) -> Any:
        while True:
            deadline = Deadline(f"rank {self._rank} waiting for a sign of life of {self._link.peer}", self._limit_s)
            try:
                with deadline.waiting():
                    message = self._inbox.get(timeout=deadline.remaining_s())
            except queue.Empty:
                raise DeadlineExceeded(
                    f"{deadline.name} took longer than {self._limit_s:g} s", remedy="see what the leader does"
                ) from None
            if isinstance(message, Gone):
                raise message
            if not isinstance(message, commands.Alive):
                return message

    def _perform(self, command: Any) -> Any:
        match command:
            case commands.Build(config):
                self._policy, self._limit_s, self._seed = self._build(config)
                return None
            case commands.Accumulate(part):
                # Ranks drop other units of an adapter; no state has to be kept for it.
                torch.manual_seed(hash((self._seed, self._rank, self.policy.optimizer.steps_taken)) % 2**63)
                return self.policy.accumulate(part)
            case commands.Recompute(part):
                return self.policy.recompute_logprobs(part)
            case commands.Step():
                self.policy.step()
            case commands.Canary(token_ids):
                self.policy.canary(token_ids)
            case commands.GatherParameter(name):
                self.policy.whole(dict(self.policy.model.named_parameters())[name])
            case commands.GatherOptimizer():
                self.policy.optimizer_state()
            case commands.GatherPolicy():
                return [tensor.cpu() for tensor in self.policy.state_dict()["old_logprobs"]]
            case commands.LoadWeights(tensors):
                self.policy.load_weights(tensors)
            case commands.LoadOptimizer(state):
                self.policy.load_optimizer_state(state)
            case commands.LoadPolicy(state):
                self.policy.load_state_dict(state)
        return None

    @property
    def policy(self) -> Policy:
        assert self._policy is not None, "the first command is to build it"
        return self._policy

    def _failed(self, error: Exception, command: object) -> LachesisError:
        """What to raise, once the leader knows."""
        if isinstance(error, LachesisError):
            failure = error
        else:
            reason = (str(error).strip().splitlines() or [""])[0]
            failure = TrainingError(
                f"its part of {type(command).__name__} could not be done: {type(error).__name__}: {reason}",
                remedy="run it with --traceback after lachesis to see where",
            )
        try:
            self._link.send(commands.Failed(failure.message, failure.remedy))
        except Gone as gone:
            return gone
        return ToldLeader(failure)

    def _read(self) -> None:
        while True:
            try:
                message = self._link.receive()
            except Gone as error:
                self._inbox.put(error)
                if not self._idle.wait(_GRACE_S):
                    self._end_process(error)
                return
            self._inbox.put(message)
            if isinstance(message, commands.End):
                return
