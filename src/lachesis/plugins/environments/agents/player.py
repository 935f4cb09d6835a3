"""Rollouts played by agents: each is a process with its own key at the recording proxy."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

from lachesis.common.deadline import Deadline
from lachesis.common.types import Prompt, SamplingParams
from lachesis.metrics.meters import Tally
from lachesis.plugins.environments.agents.process import AgentCommand, AgentExit, run_agent
from lachesis.plugins.environments.agents.proxy import AgentProxy
from lachesis.plugins.environments.agents.session import AgentSession
from lachesis.rollouts.episodes import Played, Players, RolloutFailed
from lachesis.rollouts.generation import TextDecoder
from lachesis.rollouts.rewards.attempts import TURNS


@dataclass(kw_only=True, eq=False)
class AgentPlayers(Players):
    """Players that run many agents at the same time, and make samples of the proxy's recordings.

    A rollout has failed if it took too long, exceeded a limit, exited with a code other than 0 (unless
    ``score_nonzero``) or never asked the model.

    Args:
        params: sampling parameters that hold unless an agent sets them.
        max_concurrent: threads that wait for agents; at least as many as concurrent rollouts.
    """

    agent: AgentCommand
    proxy: AgentProxy
    params: SamplingParams
    decode: TextDecoder
    max_concurrent: int
    score_nonzero: bool
    counts: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        own_words = ("exit_code", "reported") if self.agent.self_reported else ()
        self.columns: tuple[str, ...] = ("turns", "tool_calls", "output", "files", *own_words)
        self._threads = ThreadPoolExecutor(self.max_concurrent, thread_name_prefix="lachesis-agent")

    async def start(self) -> None:
        await self.proxy.start()

    async def stop(self) -> None:
        await self.proxy.stop()
        self._threads.shutdown(wait=False)

    def report(self, deadline: Deadline) -> None:
        self.proxy.begin(deadline)

    def take_counts(self) -> dict[str, float]:
        """Return ``turns`` and ``tool_calls`` since the last call."""
        return self.counts.take("turns", "tool_calls")

    async def play(self, prompt: Prompt, *, seed: int, greedy: bool = False) -> Played:
        params = replace(self.params, temperature=0.0) if greedy else self.params
        key, session = self.proxy.open(seed=seed, params=params)
        started = time.monotonic()
        try:
            ended = await self._run(prompt, key)
        finally:
            self.proxy.close(key)
        self.proxy.check()
        where = f"the agent of prompt {prompt.id!r}"
        tail = f"; its last output:\n{ended.output[-500:]}" if ended.output else ""
        if ended.timed_out:
            raise RolloutFailed(f"{where} was stopped after {time.monotonic() - started:.0f} s{tail}", cause="timeout")
        if ended.beyond:
            raise RolloutFailed(f"{where} exceeded its limit of {ended.beyond}{tail}", cause="limit")
        if ended.exit_code != 0 and not (self.score_nonzero and (ended.exit_code or 0) > 0):
            raise RolloutFailed(f"{where} ended with {ended.exit_code}{tail}", cause="crash")
        if not session.trajectories:
            raise RolloutFailed(f"{where} never asked the model{tail}", cause="silent")
        return self._played(session, ended, params)

    async def _run(self, prompt: Prompt, key: str) -> AgentExit:
        """Run an agent on a thread; end it and its processes if this is cancelled or the engine fails."""
        over = threading.Event()

        def run() -> AgentExit:
            stop = lambda: over.is_set() or self.proxy.failure is not None  # noqa: E731
            listen = partial(self.proxy.listen, key)
            return run_agent(self.agent, prompt, url=self.proxy.url, key=key, listen=listen, stop=stop)

        running = asyncio.get_running_loop().run_in_executor(self._threads, run)
        try:
            return await asyncio.shield(running)
        finally:
            over.set()
            await asyncio.gather(running, return_exceptions=True)

    def _played(self, session: AgentSession, ended: AgentExit, params: SamplingParams) -> Played:
        """Return the samples of a rollout, and the columns that reward functions get."""
        self.counts.add(turns=session.turns, tool_calls=session.calls)
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
        columns = {TURNS: messages} | {name: [values[name]] * len(samples) for name in self.columns}
        return Played(tuple(samples), columns=columns)
