"""Players of stepped environments; turns keep the engine's sampled tokens unchanged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from lachesis.common.deadline import Deadline
from lachesis.common.errors import EngineError
from lachesis.common.types import Completion, GenerationRequest, Message, Prompt, SamplingParams
from lachesis.plugins.environments.steps.game import Action, Game, Row, Seen
from lachesis.plugins.environments.steps.observations import Rendering
from lachesis.plugins.environments.steps.scoring import EpisodeEnd, scored, with_turn_advantages
from lachesis.plugins.environments.turn_server import Turn, joined
from lachesis.rollouts.episodes import Played, PolicyAccess, RolloutFailed, TaskPlayers, held_out_last
from lachesis.rollouts.generation import request_seed, reward_decoder
from lachesis.rollouts.rewards.rewarder import Rewarder

MakeGame = Callable[[Row], Awaitable[Game]]
"""Maker of a new environment for one episode, from the columns of its task."""


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Most turns of an episode, and most tokens of one of them (``None``: any)."""

    turns: int
    tokens: int | None = None


@dataclass(slots=True, kw_only=True)
class Episode:
    """Episode as it grows.

    Args:
        prompt_ids: prompt of the next turn; its first ``base`` tokens were there before the first turn.
        start: the environment's first messages; ``said``: all messages after that.
        rewards: of its turns.
        full: True if it ended because no room was left, in its last turn or for a further one.
    """

    prompt_ids: tuple[int, ...]
    base: int
    start: tuple[Message, ...] = ()
    said: list[Message] = field(default_factory=list[Message])
    turns: list[Turn] = field(default_factory=list[Turn])
    rewards: list[float] = field(default_factory=list[float])
    metrics: Counter[str] = field(default_factory=Counter[str])
    full: bool = False


@dataclass(kw_only=True, eq=False)
class StepPlayers(TaskPlayers):
    """Players of one environment, a new instance for each episode.

    ``max_tokens`` of the policy's parameters limits a sequence after its prompt, including the environment's
    observations, as in TRL.

    Args:
        rows: the tasks, by their columns; the last ``eval_tasks`` are held out.
        rewarder: reward functions besides the environment's own reward.
        owned: True if the environment itself gives an episode's reward.
        turn_advantage: weight of the advantages of turns beside those of episodes.
        turns_apart: True if only the last step's reward is in that of an episode, and only those before in a turn's.
    """

    policy: PolicyAccess
    rows: Sequence[Row]
    make: MakeGame
    rendering: Rendering
    limits: EpisodeLimits
    eval_tasks: int = 0
    rewarder: Rewarder | None = None
    owned: bool = True
    turn_advantage: float = 0.0
    turns_apart: bool = False

    def __post_init__(self) -> None:
        self._decode = reward_decoder(self.policy.tokenizer, self.policy.special_tokens)
        functions = () if self.rewarder is None else self.rewarder.names
        self.reward_names = (*functions, "environment") if self.owned else functions

    def split(self) -> tuple[list[Prompt], list[Prompt]]:
        """Return the tasks to train on, and the held-out ones."""
        prompts = [
            Prompt(id=str(number), token_ids=(), text=", ".join(f"{name}: {value}" for name, value in row.items()),
                   columns=row)
            for number, row in enumerate(self.rows)
        ]  # fmt: skip
        return held_out_last(prompts, self.eval_tasks)

    def report(self, deadline: Deadline) -> None:
        self.policy.calls.deadline = deadline

    def report_version(self, version: int) -> None:
        if self.rewarder is not None:
            self.rewarder.report_step(version)

    async def play(self, prompt: Prompt, *, seed: int, greedy: bool = False) -> Played:
        """Play one episode, from a new environment to its end."""
        params = replace(self.policy.params, temperature=0.0) if greedy else self.policy.params
        game = await self.make(prompt.columns)
        try:
            episode = await self._played(game, params, prompt=prompt, seed=seed)
            reward = sum(episode.rewards[-1 if self.turns_apart else 0 :]) + await game.worth()
        finally:
            await game.close()
        temperature = 1.0 if params.greedy else params.temperature
        samples = joined(episode.turns, decode=self._decode, temperature=temperature)
        samples[-1] = replace(samples[-1], finish_reason="length" if episode.full else "stop")
        played = Played(
            tuple(replace(sample, reward=reward, rewards=(reward,)) for sample in samples),
            metrics=dict(episode.metrics),
            state=EpisodeEnd(prompt, game.subject, episode.start, tuple(episode.said), self._turns(episode))
            if self.rewarder is not None or self.turn_advantage
            else None,
        )
        return await self._judged(played, prompt) if greedy else played

    async def _judged(self, played: Played, prompt: Prompt) -> Played:
        """Return an episode, as a group of one, with its rewards."""
        judged = await self.finish([played])
        if not judged:
            raise RolloutFailed(f"task {prompt.id}: a reward function failed on it", cause="reward")
        if isinstance(judged[0], RolloutFailed):
            raise judged[0]
        return judged[0]

    async def finish(self, played: Sequence[Played]) -> list[Played | RolloutFailed]:
        """Add the rewards of functions, which are called for a whole group, and the advantages of turns."""
        found: list[Played | RolloutFailed] = list(played)
        if self.rewarder is not None and played:
            found = await scored(played, self.rewarder, owned=self.owned)
        if not self.turn_advantage:
            return found
        whole = [one for one in found if isinstance(one, Played)]
        ended = iter(with_turn_advantages(whole, weight=self.turn_advantage, apart=self.turns_apart))
        return [next(ended) if isinstance(one, Played) else one for one in found]

    async def stop(self) -> None:
        await self.policy.calls.stop()

    async def _played(self, game: Game, params: SamplingParams, *, prompt: Prompt, seed: int) -> Episode:
        """Play all turns; the environment steps the last one too, for its reward."""
        seen = await game.begin()
        episode = self._begun(seen)
        if self._room(episode) < 1:
            length = len(episode.prompt_ids)
            raise RolloutFailed(f"task {prompt.id}: its prompt of {length} tokens leaves no room", cause="length")
        while True:
            turn = self._turn(params, room=self._room(episode))
            request = GenerationRequest(
                episode.prompt_ids, turn, seed=request_seed(seed, len(episode.turns)), conversation=f"steps {prompt.id}"
            )
            completion = await self.policy.calls.complete(request)
            if completion.finish_reason == "abort":
                raise EngineError("the engine aborted a turn", remedy="see the engine's log; the request was valid")
            episode.full = completion.finish_reason == "length" and turn.max_tokens == self._room(episode)
            episode.turns.append(Turn(episode.prompt_ids, completion))
            action = self.rendering.action(completion.token_ids)
            seen = await game.step(action)
            self._note(episode, action, seen)
            if seen.done or len(episode.turns) == self.limits.turns or not self._go_on(episode, completion, seen):
                episode.metrics["truncated"] = int(not seen.done)
                return episode

    def _begun(self, seen: Seen) -> Episode:
        prompt_ids = self.rendering.start(seen.messages)
        return Episode(prompt_ids=prompt_ids, base=len(prompt_ids), start=seen.messages)

    def _note(self, episode: Episode, action: Action, seen: Seen) -> None:
        episode.rewards.append(seen.reward)
        episode.metrics.update({"turns": 1, **seen.metrics})
        episode.said.append(seen.answer or {"role": "assistant", "content": action.text})
        episode.said += seen.messages

    def _go_on(self, episode: Episode, completion: Completion, seen: Seen) -> bool:
        """Make the prompt of the next turn; return False if it leaves no room for a completion."""
        ended = self.rendering.ended(completion.token_ids)
        added = self.rendering.added(episode.said[-1 - len(seen.messages)], seen.messages, ended=ended)
        episode.prompt_ids = (*episode.prompt_ids, *completion.token_ids, *added)
        episode.full = self._room(episode) < 1
        return not episode.full

    def _room(self, episode: Episode) -> int:
        """Return the largest number of tokens of the next turn."""
        used = len(episode.prompt_ids) - episode.base
        return min(self.policy.params.max_tokens - used, self.policy.max_context - len(episode.prompt_ids))

    def _turn(self, params: SamplingParams, *, room: int) -> SamplingParams:
        most = room if self.limits.tokens is None else min(room, self.limits.tokens)
        return replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))

    def _turns(self, episode: Episode) -> tuple[tuple[float, int], ...]:
        """Return the reward and the number of tokens of each turn that has its own reward."""
        lengths = (len(turn.completion.token_ids) for turn in episode.turns)
        turns = tuple(zip(episode.rewards, lengths, strict=True))
        return turns[:-1] if self.turns_apart else turns
