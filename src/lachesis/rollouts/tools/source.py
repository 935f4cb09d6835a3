"""Rollouts of several turns, in which the model calls tools: the turns, and the source of groups made of them."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from lachesis.common.deadline import Deadline
from lachesis.common.errors import DataError, EngineError
from lachesis.common.types import Completion, GenerationRequest, Group, Message, Prompt, SamplingParams
from lachesis.engines.base import Engine
from lachesis.rollouts.failures import note_failure
from lachesis.rollouts.generation import TextDecoder, request_seed
from lachesis.rollouts.local import LocalSource
from lachesis.rollouts.rewards.attempts import TURNS, Item
from lachesis.rollouts.tools.conversation import Conversation
from lachesis.rollouts.tools.functions import Observation, Toolbox
from lachesis.rollouts.tools.parsers import ParsedTurn, ToolParser
from lachesis.rollouts.tools.template import Continuation, answer_message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

# How many answers of tools are remembered.
_KEPT = 4096
# The cause of rollouts that the server of a tool left alone.
_LOST = "tool_server"


@dataclass(frozen=True, slots=True)
class TurnLimits:
    """When a rollout goes no further: turns of the model, tokens of one answer of a tool, seconds (``None``: any)."""

    turns: int
    result_tokens: int
    seconds: float | None = None


@dataclass(kw_only=True, eq=False)
class ToolTurns:
    """Plays rollouts in which the model calls tools, many at the same time, a turn of all of them after the other.

    A turn's prompt is the tokens so far, as they were sampled, and what the chat template adds for the answers of the
    tools. The tokens of all turns and answers together are at most ``max_tokens`` of the sampling parameters. A call in
    the last turn that there may be is not answered: nobody would read it.
    """

    engine: Engine
    toolbox: Toolbox
    parse: ToolParser
    continuation: Continuation
    tokenizer: PreTrainedTokenizerBase
    decode: TextDecoder
    limits: TurnLimits

    columns = ("turns", "tool_calls")

    def __post_init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()
        # Tools give the same to many rollouts, and to count tokens is most of what an answer costs.
        self._shortened = lru_cache(_KEPT)(self._shorten)

    def sample(
        self,
        prompts: Sequence[Prompt],
        *,
        params: SamplingParams,
        num_generations: int,
        seeds: Sequence[int],
        deadline: Deadline,
    ) -> list[Item]:
        """``num_generations`` rollouts of each prompt, unscored; the first turn of all is as without tools.

        Those of which a tool's server broke off are left out: of a prompt there may be fewer, even none.

        Raises:
            DataError: a prompt is a text, in which the model is not told of its tools.
            ConfigError: the chat template cannot render an answer, or a parser of the user failed.
            EngineError, DeadlineExceeded.
        """
        for prompt in prompts:
            if prompt.messages is None:
                raise DataError(
                    f"prompt {prompt.id!r} is a text, and tools are told of in a conversation",
                    remedy="write prompts as lists of messages, or set data.system_prompt",
                )
        started = time.monotonic()
        first = [
            GenerationRequest(prompt.token_ids, params, n=num_generations, seed=seed, conversation=f"tools {seed}")
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        conversations = [
            [Conversation(request.prompt_ids, name=request.conversation) for _ in range(num_generations)]
            for request in first
        ]
        live: list[tuple[Conversation, int]] = []
        for row, seed, answers in zip(conversations, seeds, self._generate(first, deadline), strict=True):
            for number, (conversation, completion) in enumerate(zip(row, answers, strict=True)):
                conversation.sample(completion)
                live.append((conversation, request_seed(seed, number)))
        while live := self._answer(live, params=params, started=started):
            requests = [self._next_turn(conversation, seed, params) for conversation, seed in live]
            for (conversation, _), answers in zip(live, self._generate(requests, deadline), strict=True):
                conversation.sample(answers[0])
        return self._items(prompts, conversations, params)

    def take_counts(self) -> dict[str, float]:
        """Since the last call: ``turns``, ``tool_calls``, ``tool_errors``; of each tool ``tool_calls/NAME`` and
        ``tool_errors/NAME``; where rollouts failed, ``rollout_failures`` and ``rollout_failures/CAUSE``."""
        with self._counting:
            counts, self._counts = self._counts, Counter()
        names = ("turns", "tool_calls", "tool_errors")
        each = [name for name in counts if name not in names]
        return {name: float(counts[name]) for name in (*names, *sorted(each))}

    def close(self) -> None:
        """End the threads of tools. Idempotent."""
        self.toolbox.close()

    def _generate(self, requests: Sequence[GenerationRequest], deadline: Deadline) -> list[list[Completion]]:
        with deadline.waiting():
            answers = self.engine.generate(requests, deadline=deadline)
        if any(one.finish_reason == "abort" for answer in answers for one in answer):
            raise EngineError("the engine aborted a turn", remedy="look into its log; the request was sound")
        self._count(turns=sum(len(answer) for answer in answers))
        return answers

    def _next_turn(self, conversation: Conversation, seed: int, params: SamplingParams) -> GenerationRequest:
        room = params.max_tokens - len(conversation.token_ids)
        turn = replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))
        seed = request_seed(seed, conversation.turns)
        return GenerationRequest(conversation.next_prompt, turn, n=1, seed=seed, conversation=conversation.name)

    def _answer(
        self, live: Sequence[tuple[Conversation, int]], *, params: SamplingParams, started: float
    ) -> list[tuple[Conversation, int]]:
        """Call the tools that the last turns ask for; returns the rollouts that go on."""
        late = self.limits.seconds is not None and time.monotonic() - started > self.limits.seconds
        asked: list[tuple[Conversation, int, ParsedTurn]] = []
        for conversation, seed in live:
            turn = self._read(conversation)
            last = late or conversation.turns == self.limits.turns or conversation.finish_reason != "stop"
            conversation.messages.append(self._message(turn, conversation))
            if turn.calls and not last:
                asked.append((conversation, seed, turn))
        found = iter(self.toolbox.call_all([call for _, _, turn in asked for call in turn.calls]))
        on: list[tuple[Conversation, int]] = []
        for conversation, seed, turn in asked:
            observations = [self._cut(next(found)) for _ in turn.calls]
            self._count_calls(observations)
            conversation.failed = next((one.text for one in observations if one.lost), "")
            if not conversation.failed and self._tell(conversation, observations, most=params.max_tokens):
                on.append((conversation, seed))
        return on

    def _read(self, conversation: Conversation) -> ParsedTurn:
        """The last turn. Special tokens are part of the text, as some models write calls with them."""
        length = len(conversation.mask) - _trailing(conversation.mask, 1)
        ids = conversation.token_ids[length:]
        if ids and ids[-1] == self.tokenizer.eos_token_id:
            ids = ids[:-1]
        return self.parse(str(self.tokenizer.decode(ids, skip_special_tokens=False)), self.toolbox.schemas)

    def _message(self, turn: ParsedTurn, conversation: Conversation) -> Message:
        first, conversation.calls = conversation.calls, conversation.calls + len(turn.calls)
        return answer_message(turn.content, [(call.name, call.arguments) for call in turn.calls], first=first)

    def _cut(self, observation: Observation) -> Observation:
        """An answer of no more tokens than a tool's may have."""
        return replace(observation, text=self._shortened(observation.text))

    def _shorten(self, text: str) -> str:
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) <= self.limits.result_tokens:  # type: ignore[arg-type]
            return text
        kept = str(self.tokenizer.decode(ids[: self.limits.result_tokens], skip_special_tokens=False))  # type: ignore[index]
        return f"{kept} ... (cut)"

    def _tell(self, conversation: Conversation, observations: Sequence[Observation], *, most: int) -> bool:
        """Give the answers to the model; False where no room for a further turn would be left."""
        answer = conversation.messages[-1]
        told = [
            observation.message() | {"tool_call_id": call["id"]}
            for observation, call in zip(observations, answer["tool_calls"], strict=True)
        ]
        ended = conversation.token_ids[-1] == self.tokenizer.eos_token_id
        tokens = self.continuation.tokens(answer, told, ended=ended)
        if len(conversation.token_ids) + len(tokens) >= most:
            conversation.finish_reason = "length"
            return False
        conversation.give(tokens)
        conversation.messages += told
        return True

    def _items(
        self, prompts: Sequence[Prompt], conversations: Sequence[Sequence[Conversation]], params: SamplingParams
    ) -> list[Item]:
        conversations = [self._whole(prompt, row) for prompt, row in zip(prompts, conversations, strict=True)]
        texts = iter(self.decode([one.token_ids for row in conversations for one in row]))
        temperature = 1.0 if params.greedy else params.temperature
        return [
            Item(
                Group(prompt, tuple(one.as_sample(text=next(texts), temperature=temperature) for one in row)),
                {
                    TURNS: [one.messages for one in row],
                    "turns": [one.turns for one in row],
                    "tool_calls": [one.calls for one in row],
                },
            )
            for prompt, row in zip(prompts, conversations, strict=True)
        ]

    def _whole(self, prompt: Prompt, row: Sequence[Conversation]) -> list[Conversation]:
        """Those that came to an end; the others are counted by their cause, as if they had never been."""
        for one in row:
            if one.failed:
                note_failure(one.failed, cause=_LOST, prompt_id=prompt.id)
                logger.warning("a rollout is left out of its group (%s): %s", _LOST, one.failed)
                self._count(**{"rollout_failures": 1, f"rollout_failures/{_LOST}": 1})
        return [one for one in row if not one.failed]

    def _count_calls(self, observations: Sequence[Observation]) -> None:
        for one in observations:
            name = one.call.name if one.call.name in {tool.name for tool in self.toolbox.tools} else "unknown"
            self._count(**{"tool_calls": 1, f"tool_calls/{name}": 1})
            if one.failed:
                self._count(**{"tool_errors": 1, f"tool_errors/{name}": 1})

    def _count(self, **amounts: int) -> None:
        with self._counting:
            self._counts.update(amounts)


def _trailing(values: Sequence[int], value: int) -> int:
    """How many values at the end are equal to ``value``."""
    count = 0
    while count < len(values) and values[-1 - count] == value:
        count += 1
    return count


@dataclass(kw_only=True, eq=False)
class ToolSource(LocalSource):
    """A source whose samples are rollouts with tools.

    Reward functions get all messages of a rollout as its completion, those of tools included, and the columns ``turns``
    and ``tool_calls``.
    """

    turns: ToolTurns

    def counters(self) -> dict[str, float]:
        """Those of :class:`LocalSource`, and those of :meth:`ToolTurns.take_counts`."""
        return super().counters() | self.turns.take_counts()

    def close(self) -> None:
        """End the threads of tools. Idempotent."""
        self.turns.close()

    def _check_columns(self) -> None:
        self.rewarder.check_columns({*self.stream.columns, *self.turns.columns})

    def _sample(self, prompts: list[Prompt], seeds: list[int], deadline: Deadline) -> list[Item]:
        return self.turns.sample(
            prompts, params=self.params, num_generations=self.num_generations, seeds=seeds, deadline=deadline
        )
