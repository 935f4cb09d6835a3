"""Rollouts that agents play: each is a process with its own key at the recording proxy."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Literal

from lachesis.common.deadline import Deadline
from lachesis.common.types import Prompt, SamplingParams
from lachesis.plugins.environments.agents.process import AgentCommand, AgentExit, run_agent
from lachesis.plugins.environments.agents.proxy import AgentProxy
from lachesis.plugins.environments.agents.session import AgentSession
from lachesis.rollouts.failures import note_failure
from lachesis.rollouts.generation import TextDecoder, request_seed
from lachesis.rollouts.local import item_of
from lachesis.rollouts.partial_rollouts import KeptGroup, KeptRollout
from lachesis.rollouts.rewards.attempts import TURNS, Item

logger = logging.getLogger(__name__)

_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class AgentRun:
    """A rollout that came to an end."""

    session: AgentSession
    ended: AgentExit


@dataclass(frozen=True, slots=True)
class Failed:
    """A rollout that may not be scored, and why, in one word for counting and in a sentence."""

    cause: Literal["timeout", "crash", "silent", "limit"]
    message: str


@dataclass(kw_only=True, eq=False)
class AgentRollouts:
    """Player that runs agents, many at the same time, and makes samples of the proxy's records.

    A rollout that took too long, ended with another code than 0 (unless ``score_nonzero``) or never asked the model
    fails: it is replayed up to ``retries`` times, and then left out of its group and counted by its cause.
    """

    agent: AgentCommand
    proxy: AgentProxy
    decode: TextDecoder
    max_concurrent: int
    retries: int
    score_nonzero: bool

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that rewards get of a rollout."""
        own_words = ("exit_code", "reported") if self.agent.self_reported else ()
        return ("turns", "tool_calls", "output", "files", *own_words)

    def __post_init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._closing = threading.Event()
        self._started = False

    def sample(
        self,
        prompts: Sequence[Prompt],
        *,
        params: SamplingParams,
        num_generations: int,
        seeds: Sequence[int],
        deadline: Deadline,
        kept: Sequence[KeptGroup] | None = None,
    ) -> list[Item]:
        """``num_generations`` rollouts of each prompt, unscored; fewer where some failed, even none.

        Args:
            kept: of each prompt, the rollouts that are there already, and who is told of each other that is finished.

        Raises:
            EngineError: the engine failed, or the command cannot be run.
            DeadlineExceeded: all agents have been ended then.
        """
        self._start()
        kept = kept or [KeptGroup() for _ in prompts]
        with ThreadPoolExecutor(self.max_concurrent, thread_name_prefix="lachesis-agent") as pool:
            over = threading.Event()
            rows: list[list[Future[KeptRollout | Failed]]] = []
            for prompt, seed, group in zip(prompts, seeds, kept, strict=True):
                numbers = [number for number in range(num_generations) if number not in group.rollouts]
                play = partial(self._play, prompt, seed, params, deadline, over.is_set, group.note)
                rows.append([pool.submit(play, number) for number in numbers])
            try:
                self._wait([future for row in rows for future in row], deadline)
            finally:  # the pool waits for its threads, which end their agents
                over.set()
                for row in rows:
                    for future in row:
                        future.cancel()
        played = [
            [*group.rollouts.values(), *(future.result() for future in row)]
            for group, row in zip(kept, rows, strict=True)
        ]
        return [self._item(prompt, row) for prompt, row in zip(prompts, played, strict=True)]

    def take_counts(self) -> dict[str, float]:
        """Return counts since the last call.

        ``turns``, ``tool_calls``, ``refilled_rollouts`` and ``rollout_failures``, these also by cause.
        """
        with self._counting:
            counts, self._counts = self._counts, Counter()
        names = ("turns", "tool_calls", "refilled_rollouts", "rollout_failures")
        return {name: float(counts[name]) for name in (*names, *sorted(set(counts) - set(names)))}

    def close(self) -> None:
        """End all agents and close the proxy. Idempotent."""
        self._closing.set()
        self.proxy.stop()

    def _start(self) -> None:
        with self._counting:
            if not self._started:
                self.proxy.start()
                self._started = True

    def _wait(self, futures: Sequence[Future[KeptRollout | Failed]], deadline: Deadline) -> None:
        """Wait until all have ended; raise the error of one, of the engine, or of the deadline."""
        with deadline.waiting():
            pending = set(futures)
            while pending:
                done, pending = wait(pending, timeout=_LOOK_S, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                    deadline.progressed()
                if self.proxy.failure is not None:
                    failure, self.proxy.failure = self.proxy.failure, None
                    raise failure
                if pending:
                    deadline.check(f"{len(futures) - len(pending)} of {len(futures)} agents have ended")

    def _play(
        self,
        prompt: Prompt,
        group_seed: int,
        params: SamplingParams,
        deadline: Deadline,
        over: Callable[[], bool],
        note: Callable[[KeptRollout], None],
        number: int,
    ) -> KeptRollout | Failed:
        seed = request_seed(group_seed, number)
        for attempt in range(self.retries + 1):
            outcome = self._attempt(prompt, request_seed(seed, attempt), params, deadline, over)
            if isinstance(outcome, AgentRun):
                rollout = self._finished(number, outcome, params)
                note(rollout)
                return rollout
            if over() or self._closing.is_set():
                return outcome
            self._note(outcome, prompt)
            self._count(refilled_rollouts=int(attempt < self.retries))
        return outcome

    def _attempt(
        self, prompt: Prompt, seed: int, params: SamplingParams, deadline: Deadline, over: Callable[[], bool]
    ) -> AgentRun | Failed:
        key, session = self.proxy.open(seed=seed, params=params)
        started = time.monotonic()
        try:
            ended = run_agent(
                self.agent,
                prompt,
                url=self.proxy.url,
                key=key,
                listen=lambda listener: self.proxy.listen(key, listener),
                stop=lambda: over() or self._closing.is_set(),
                limit_s=deadline.remaining_s(),
            )
        finally:
            self.proxy.close(key)
        where = f"the agent of prompt {prompt.id!r}"
        tail = f"; it wrote last:\n{ended.output[-500:]}" if ended.output else ""
        if ended.timed_out:
            return Failed("timeout", f"{where} was ended after {time.monotonic() - started:.0f} s{tail}")
        if ended.beyond:
            return Failed("limit", f"{where} went beyond its limit of {ended.beyond}{tail}")
        if ended.exit_code != 0 and not (self.score_nonzero and (ended.exit_code or 0) > 0):
            return Failed("crash", f"{where} ended with {ended.exit_code}{tail}")
        if not session.trajectories:
            return Failed("silent", f"{where} never asked the model{tail}")
        return AgentRun(session, ended)

    def _finished(self, number: int, played: AgentRun, params: SamplingParams) -> KeptRollout:
        """Return the samples of a rollout, and the columns for reward functions, with a value per sample."""
        session, ended = played.session, played.ended
        self._count(turns=session.turns, tool_calls=session.calls)
        texts = self.decode([trajectory.conversation.token_ids for trajectory in session.trajectories])
        temperature = 1.0 if params.greedy else params.temperature
        samples = [
            trajectory.conversation.as_sample(text=text, temperature=temperature)
            for trajectory, text in zip(session.trajectories, texts, strict=True)
        ]
        values = {
            "turns": session.turns,
            "tool_calls": session.calls,
            "output": ended.output,
            "files": dict(ended.files),
            "exit_code": ended.exit_code,
            "reported": ended.reward,
        }
        messages = [list(trajectory.messages) for trajectory in session.trajectories]
        extras = {TURNS: messages} | {name: [values[name]] * len(samples) for name in self.columns}
        return KeptRollout(number, tuple(samples), extras)

    def _note(self, failure: Failed, prompt: Prompt) -> None:
        note_failure(failure.message, cause=failure.cause, prompt_id=prompt.id)
        name = f"rollout_failures/{failure.cause}"
        with self._counting:
            first = not self._counts[name]
        if first:
            logger.warning("a rollout is left out of its group (%s): %s", failure.cause, failure.message)
        self._count(**{name: 1, "rollout_failures": 1})

    def _count(self, **amounts: int) -> None:
        with self._counting:
            self._counts.update(amounts)

    def _item(self, prompt: Prompt, row: Sequence[KeptRollout | Failed]) -> Item:
        return item_of(prompt, [one for one in row if isinstance(one, KeptRollout)], columns=(TURNS, *self.columns))
