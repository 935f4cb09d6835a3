"""Bridges to engines in other processes: the servers, their processes, and recovery from their deaths."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal

import torch

from lachesis.bridges.base import Bridge, PolicyT
from lachesis.bridges.proof import Proof
from lachesis.common.deadline import Deadline
from lachesis.common.errors import DeadlineExceeded, EngineError, LachesisError
from lachesis.config.schema import BridgeCapabilities
from lachesis.engines.base import PauseMode
from lachesis.engines.fleet import State
from lachesis.engines.http.client import HttpEngine
from lachesis.engines.serving.backend import MEMORY_PARTS
from lachesis.process.managed import ManagedProcess, launch_together, wait_together

logger = logging.getLogger("lachesis")

ProofBuilder = Callable[[PolicyT, HttpEngine], Proof]
# Returns the command with which the server of a number serves the checkpoint in a directory.
Command = Callable[[int, Path], Sequence[str]]
_LOOK_S = 0.05
# Seconds that a server that was dead has to answer.
_GREETING_S = 2.0
# A server that answered within this many seconds is taken to be alive; if it is not, the transfer finds out.
_QUIET_S = 1.0


class OwnedEngine:
    """Servers with their processes in the same order, and the run that they belong to.

    Args:
        engine: the client of the servers.
        processes: one for each server, running or not.
        owner: the run's name, under which it claims each new session.
        start_s: limit of a restart after a death, in seconds.
    """

    def __init__(
        self, *, engine: HttpEngine, processes: Sequence[ManagedProcess], owner: str, start_s: float | None = None
    ) -> None:
        self.engine = engine
        self._start_s = start_s
        self._processes = tuple(processes)
        self._owner = owner
        self._starts: dict[str, Future[None]] = {}
        self._stopping = threading.Event()
        self._threads = ThreadPoolExecutor(max(1, len(self._processes)), thread_name_prefix="lachesis-replacement")

    def restart(self, *, deadline: Deadline, command: Command | None = None, checkpoint: Path | None = None) -> None:
        """Start all servers, again or for the first time, and claim them.

        Args:
            deadline: by which they must serve.
            command: makes the command that serves ``checkpoint``; without it each server keeps its own.

        Raises:
            EngineError: a server died or its port is taken; with the last lines of its log.
            DeadlineExceeded: one was not able to serve in time.
        """
        self.stop()
        if command is not None and checkpoint is not None:
            for number, process in enumerate(self._processes):
                process.command = tuple(map(str, command(number, checkpoint)))
        try:
            launch_together(self._processes)
            wait_together(self._processes, deadline=deadline)
        except BaseException:  # if one fails, none may be left running
            self.stop()
            raise
        self.engine.connect(deadline=deadline)
        self.engine.claim(self._owner, deadline=deadline)

    def start_again(self) -> None:
        """Run :meth:`restart` within ``start_s`` for servers that died."""
        deadline = Deadline("the engine's second start", self._start_s, "deadlines.engine_start_s")
        with deadline.waiting():
            self.restart(deadline=deadline)

    def replace_dead(self, *, waiting: bool = False) -> tuple[str, ...]:
        """Restart dead servers in the background; return those that became ready since the last call.

        A hung server is ended first. Others continue meanwhile, and one that cannot be started stays dead. With
        ``waiting`` all starts are over on return.
        """
        ready = self._ended_starts()
        fleet = self.engine.fleet
        for control, process in zip(self.engine.controls, self._processes, strict=True):
            if control.url not in self._starts and fleet.state(control.url) is State.DEAD:
                logger.warning("restarting the engine at %s: %s", control.url, fleet.reason(control.url))
                fleet.replaced(control.url)
                self._starts[control.url] = self._threads.submit(self._replace, process)
        if waiting:
            wait(self._starts.values())
            ready += self._ended_starts()
        return ready

    def _ended_starts(self) -> tuple[str, ...]:
        """Return the servers whose start has succeeded; mark those whose start failed as dead again."""
        ready: list[str] = []
        for url in [url for url, start in self._starts.items() if start.done()]:
            if (error := self._starts.pop(url).exception()) is None:
                ready.append(url)
            else:
                logger.error("the engine at %s cannot be restarted: %s", url, error)
                self.engine.fleet.died(url, str(error))
        return tuple(ready)

    def _replace(self, process: ManagedProcess) -> None:
        process.stop()
        deadline = Deadline(
            f"the replacement of {process.name}", self._start_s, "deadlines.engine_start_s", watch=self._watch_stop
        )
        process.start(deadline=deadline)

    def _watch_stop(self) -> None:
        if self._stopping.is_set():
            raise EngineError("the run ends")

    def stop(self) -> None:
        """Stop all servers. Idempotent."""
        self._stopping.set()
        wait(self._starts.values())
        self._starts.clear()
        self._stopping.clear()
        for process in self._processes:
            process.stop()

    def died(self, *, within_s: float = 10.0) -> bool:
        """Return True if no server is left, or none will be within ``within_s`` seconds.

        Connections break a moment before, and vLLM's server checks its engine only every 5 s.
        """
        deadline = Deadline("the end of a server that does not answer", within_s)
        pause = threading.Event()
        while any(process.pid is not None for process in self._processes):
            if deadline.remaining_s() == 0.0:
                return False
            pause.wait(_LOOK_S)
        return True

    def move_log(self, path: Path) -> None:
        """Move the servers' log to ``path`` while they write it, on the same file system; an existing file stays.

        Raises:
            EngineError: it cannot be moved.
        """
        for number, process in enumerate(self._processes):
            place = path if number == 0 else path.with_stem(f"{path.stem}-{number}")
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                if place.exists():
                    os.replace(place, place.with_stem(f"{place.stem}-before"))
                os.replace(process.log_path, place)
            except OSError as error:
                raise EngineError(
                    f"the engine's log {process.log_path} cannot be moved to {place}: {error.strerror}",
                    remedy="check the directory and its permissions",
                ) from error
            process.log_path = place


def empty_cache(policy: object) -> None:
    """Release GPU memory that this process's allocator holds."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers(Generic[PolicyT]):
    """Bridge to servers, with the options that all such bridges need.

    Args:
        engine: their client; they are claimed by this run.
        proof_builder: makes the proof of sync once both sides exist, or ``None`` for no proof.
        owned: their processes, if the run starts them: one that dies is restarted.
        trains_in_engine: the policy is built on the engine's memory, and lost with it.
        sleep_level: they give their GPU memory back while the trainer computes; at level 1 their weights wait on the
            host, at level 2 they are dropped, because new ones come in any case; at 0 they do not sleep.
        make_room: has the trainer give back what its allocators keep without need, on each GPU on which servers wake.
        members: returns the addresses of the wanted servers, if they may change; a LachesisError changes nothing.
        sync_s, every_steps, pause_mode: as in :class:`Bridge`.
    """

    engine: HttpEngine
    proof_builder: ProofBuilder[PolicyT] | None
    owned: OwnedEngine | None = None
    trains_in_engine: bool = False
    sleep_level: Literal[0, 1, 2] = 0
    make_room: Callable[[PolicyT], None] = empty_cache
    members: Callable[[], Sequence[str]] | None = None
    sync_s: float | None = None
    every_steps: int = 1
    pause_mode: PauseMode = "keep"


class ExternalBridge(Bridge[PolicyT]):
    """Bridge between a policy and ``servers``; a subclass implements the transfer.

    ``capabilities`` are as its section of the configuration declares them.
    """

    def __init__(self, servers: Servers[PolicyT], *, capabilities: BridgeCapabilities) -> None:
        super().__init__(sync_s=servers.sync_s, every_steps=servers.every_steps, pause_mode=servers.pause_mode)
        self.capabilities = capabilities
        self._servers = servers
        self._owned = servers.owned
        self._recovered: int | None = None

    @property
    def engine(self) -> HttpEngine:
        return self._servers.engine

    def prepare(self, policy_builder: Callable[[], PolicyT]) -> PolicyT:
        self._policy = policy_builder()
        self.renew()
        return self._policy

    def _assemble(self) -> None:
        """Find out which servers have come and gone.

        Raises:
            EngineUnreachable: none lives.
        """
        if self.capabilities.owns_engine or self.capabilities.shares_storage:
            return
        self._update_members()
        if len(self.engine.urls) > 1:
            self._meet()

    def _absent(self) -> tuple[str, ...]:
        return self.engine.fleet.having(State.DEAD, State.STARTING)

    def _update_members(self) -> None:
        if self._servers.members is None:
            return
        try:
            urls = self._servers.members()
        except LachesisError as error:
            logger.warning("the engines are unchanged: %s", error)
            return
        if not urls:
            logger.warning("the engines are unchanged: engine.urls names no engine now")
            return
        self.engine.set_members(urls, deadline=Deadline("releasing engines", _GREETING_S))

    def _meet(self) -> None:
        """Replace dead servers, and admit servers that are new or back."""
        engine = self.engine
        engine.look(quiet_s=_QUIET_S)
        for url in self._replaced() if self._owned is not None else self._absent():
            try:
                engine.greet(url, deadline=Deadline(f"an answer of {url}", _GREETING_S))
            except (EngineError, DeadlineExceeded) as error:
                engine.fleet.died(url, error.message)
            else:
                logger.info("the engine at %s is back; it will serve again once it has the weights", url)

    def _replaced(self) -> tuple[str, ...]:
        """Return the servers that are ready.

        A starting one takes the memory that a sleeping one leaves to the trainer.
        """
        assert self._owned is not None, "others start them"
        sleeps = bool(self._servers.sleep_level)
        if sleeps and self.engine.fleet.having(State.DEAD):
            self._servers.make_room(self.policy)
        return self._owned.replace_dead(waiting=sleeps)

    def rest(self) -> None:
        if level := self._servers.sleep_level:
            started = time.perf_counter()
            self.retry(lambda: self.engine.sleep(level=level))
            self._slept = time.perf_counter() - started

    def wake(self, *, for_weights: bool = False) -> None:
        if self._servers.sleep_level:
            self._servers.make_room(self.policy)  # memory cached by the training pass goes to the engine again
            self.engine.wake_up(("weights",) if for_weights else MEMORY_PARTS)

    def recover(self, error: EngineError) -> None:
        """Restart one of the run's own engines that died, once for each version, and bring it the weights.

        Raises:
            EngineError: ``error``, if the engine lives or is not the run's; or if the weights were in its memory, or it
                died twice with these weights.
        """
        if self._owned is None or not self._owned.died():
            raise error
        if self._servers.trains_in_engine:
            raise EngineError(
                f"the engine died, and the weights in its memory are lost: {error.message}",
                remedy="continue from the last checkpoint with --resume",
            ) from error
        if self._recovered == self.version:
            raise EngineError(
                f"the engine died a second time with weight version {self.version}: {error.message}",
                remedy="read the engine's log: another restart will not help",
            ) from error
        self._recovered = self.version
        logger.warning("the engine died; restarting it with weight version %d", self.version)
        if not self.capabilities.owns_engine:  # bridges that own the engine start it in their transfer
            if self._servers.sleep_level:
                self._servers.make_room(self.policy)
            self._owned.start_again()
        self.renew()
        self.sync(self.version)

    def close(self) -> None:
        self.engine.close()
        if self._owned is not None:
            self._owned.stop()

    def renew(self) -> None:
        """Forget the proof and channels of an engine that has been replaced or restarted."""
        if not self.capabilities.owns_engine:  # bridges that own the engine build it in the next transfer
            self._build_proof()

    def _build_proof(self) -> None:
        """Build the proof for one session of the engine; a restarted engine needs a new one."""
        if self._servers.proof_builder is not None:
            self.proof: Proof | None = self._servers.proof_builder(self.policy, self.engine)
