"""Rollouts of several turns, in which the model calls tools: all of them play a turn after the other."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING

from lachesis.common.deadline import Deadline
from lachesis.common.errors import DataError, EngineError
from lachesis.common.types import Completion, GenerationRequest, Message, Prompt, SamplingParams
from lachesis.engines.base import Engine
from lachesis.rollouts.failures import note_failure
from lachesis.rollouts.generation import TextDecoder, request_seed, text_decoder
from lachesis.rollouts.local import item_of
from lachesis.rollouts.partial_rollouts import KeptGroup, KeptRollout
from lachesis.rollouts.rewards.attempts import TURNS, Item
from lachesis.rollouts.tools.conversation import Conversation
from lachesis.rollouts.tools.memo import Remembered
from lachesis.rollouts.tools.parsers import ParsedTurn, ToolParser
from lachesis.rollouts.tools.template import Continuation, Told, answer_message, short_token_ids
from lachesis.rollouts.tools.toolbox import Observation, Toolbox

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


class _Group:
    """The rollouts of a prompt: those that have ended, of this process or before it, and which are missing."""

    def __init__(self, prompt: Prompt, seed: int, kept: KeptGroup, size: int) -> None:
        self.prompt = prompt
        self.seed = seed
        self.ended = [rollout for number, rollout in kept.rollouts.items() if number < size]
        self.missing = [number for number in range(size) if number not in kept.rollouts]
        self._note = kept.note

    def first_turn(self, params: SamplingParams) -> GenerationRequest:
        """One request for all; where some are there already with a seed of its own, or these might come again."""
        seed = self.seed if not self.ended else request_seed(self.seed, -len(self.ended))
        name = f"tools {self.seed}"
        return GenerationRequest(self.prompt.token_ids, params, n=len(self.missing), seed=seed, conversation=name)

    def begin(self, answers: Sequence[Completion]) -> list[_Live]:
        """The rollouts that are missing, after their first turns."""
        live: list[_Live] = []
        for number, completion in zip(self.missing, answers, strict=True):
            conversation = Conversation(self.prompt.token_ids, name=f"tools {self.seed}")
            conversation.sample(completion)
            live.append(_Live(self, number, conversation, request_seed(self.seed, number)))
        return live

    def end(self, rollout: KeptRollout) -> None:
        """One of them has ended."""
        self.ended.append(rollout)
        self._note(rollout)


class _Said:
    """What a turn of the model says; equal turns of all rollouts share it, and its messages, which nobody changes."""

    def __init__(self, turn: ParsedTurn) -> None:
        self.calls = turn.calls
        self._content = turn.content
        self._messages: dict[int, Message] = {}

    def message(self, first: int) -> Message:
        """The turn as a message, whose calls are numbered from ``first`` on."""
        if (known := self._messages.get(first)) is not None:
            return known
        calls = [(call.name, call.arguments) for call in self.calls]
        return self._messages.setdefault(first, answer_message(self._content, calls, first=first))


@dataclass(frozen=True, slots=True, eq=False)
class _Live:
    """A rollout that goes on."""

    group: _Group
    number: int
    conversation: Conversation
    seed: int


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
        self._end_token = self.tokenizer.eos_token_id  # looked up by the library each time that it is asked for
        self._decoded = text_decoder(self.tokenizer, as_sampled=False)
        # Rollouts of a prompt often say the same, and are told the same.
        self._parsed = Remembered(self._turns, most=_KEPT)
        self._shortened = Remembered(self._cut, most=_KEPT)

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
        """``num_generations`` rollouts of each prompt, unscored; the first turn of all is as without tools.

        Those of which a tool's server broke off are left out: of a prompt there may be fewer, even none.

        Args:
            kept: of each prompt, the rollouts that are there already, and who is told of each other that is finished.

        Raises:
            DataError: a prompt is a text, in which the model is not told of its tools.
            ConfigError: the chat template cannot render an answer, or a parser of the user failed.
            EngineError, DeadlineExceeded.
        """
        for prompt in prompts:
            if prompt.messages is None:
                raise DataError(
                    f"prompt {prompt.id!r} is a text, and tools need a conversation",
                    remedy="write prompts as lists of messages, or set data.system_prompt",
                )
        started = time.monotonic()
        groups = [
            _Group(prompt, seed, one, num_generations)
            for prompt, seed, one in zip(prompts, seeds, kept or [KeptGroup() for _ in prompts], strict=True)
        ]
        begun = [group for group in groups if group.missing]
        live: list[_Live] = []
        with_room = cache(partial(_with_room, params))
        if begun:
            answers = self._generate([group.first_turn(params) for group in begun], deadline)
            live = [one for group, found in zip(begun, answers, strict=True) for one in group.begin(found)]
        while live:
            on = self._answer(live, params=params, started=started)
            self._end(live, on, params)
            live = on
            if live:
                turns = self._generate(_next_turns(live, params.max_tokens, with_room), deadline)
                for one, completions in zip(live, turns, strict=True):
                    one.conversation.sample(completions[0])
        return [item_of(group.prompt, group.ended, columns=(TURNS, *self.columns)) for group in groups]

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

    def _answer(self, live: Sequence[_Live], *, params: SamplingParams, started: float) -> list[_Live]:
        """Call the tools that the last turns ask for; returns the rollouts that go on."""
        late = self.limits.seconds is not None and time.monotonic() - started > self.limits.seconds
        asked: list[tuple[_Live, _Said]] = []
        for one, turn in zip(live, self._read([one.conversation for one in live]), strict=True):
            conversation = one.conversation
            last = late or conversation.turns == self.limits.turns or conversation.finish_reason != "stop"
            conversation.messages.append(turn.message(conversation.calls))
            conversation.calls += len(turn.calls)
            if turn.calls and not last:
                asked.append((one, turn))
        observations = self.toolbox.call_all([call for _, turn in asked for call in turn.calls])
        self._count_calls(observations)
        shortened = zip(observations, self._shortened([one.text for one in observations]), strict=True)
        answered: list[_Live] = []
        told: list[Told] = []
        for one, turn in asked:
            seen = [next(shortened) for _ in turn.calls]
            one.conversation.failed = next((text for observation, text in seen if observation.lost), "")
            if not one.conversation.failed:
                answered.append(one)
                told.append(self._told(one.conversation, seen))
        return [
            one
            for one, what, tokens in zip(answered, told, self.continuation.tokens_of(told), strict=True)
            if _tell(one.conversation, what, tokens, most=params.max_tokens)
        ]

    def _read(self, conversations: Sequence[Conversation]) -> list[_Said]:
        """The last turns."""
        end = self._end_token
        turns = [one.last_turn for one in conversations]
        return self._parsed([ids[:-1] if ids and ids[-1] == end else ids for ids in turns])

    def _turns(self, turns: Sequence[Sequence[int]]) -> list[_Said]:
        """Special tokens are part of the text, as some models write calls with them."""
        schemas = self.toolbox.schemas
        return [_Said(self.parse(text, schemas)) for text in self._decoded(turns)]

    def _cut(self, texts: Sequence[str]) -> list[str]:
        """Answers of no more tokens than a tool's may have."""
        tokenized = short_token_ids(self.tokenizer, texts)
        most = self.limits.result_tokens
        return [
            text if len(ids) <= most else f"{self._decoded([ids[:most]])[0]} ... (cut)"
            for text, ids in zip(texts, tokenized, strict=True)
        ]

    def _told(self, conversation: Conversation, seen: Sequence[tuple[Observation, str]]) -> Told:
        """The answers to the calls of a conversation's last message, with the texts that there is room for."""
        answer = conversation.messages[-1]
        ids = [call["id"] for call in answer["tool_calls"]]
        named = [
            observation.message(text, tool_call_id=name) for (observation, text), name in zip(seen, ids, strict=True)
        ]
        return Told(answer, named, ended=conversation.token_ids[-1] == self._end_token, ids=ids)

    def _end(self, live: Sequence[_Live], on: Sequence[_Live], params: SamplingParams) -> None:
        """Those that do not go on have ended; one that failed is counted by its cause, as if it had never been."""
        goes_on = set(on)
        over = [one for one in live if one not in goes_on]
        for one in over:
            if reason := one.conversation.failed:
                note_failure(reason, cause=_LOST, prompt_id=one.group.prompt.id)
                logger.warning("a rollout is left out of its group (%s): %s", _LOST, reason)
                self._count(**{"rollout_failures": 1, f"rollout_failures/{_LOST}": 1})
        ended = [one for one in over if not one.conversation.failed]
        texts = self.decode([one.conversation.token_ids for one in ended]) if ended else []
        for one, text in zip(ended, texts, strict=True):
            one.group.end(self._rollout(one, text, params))

    def _rollout(self, one: _Live, text: str, params: SamplingParams) -> KeptRollout:
        conversation = one.conversation
        sample = conversation.as_sample(text=text, temperature=1.0 if params.greedy else params.temperature)
        extras = {TURNS: [conversation.messages], "turns": [conversation.turns], "tool_calls": [conversation.calls]}
        return KeptRollout(one.number, (sample,), extras)

    def _count_calls(self, observations: Sequence[Observation]) -> None:
        tools = {tool.name for tool in self.toolbox.tools}
        names = [(one.call.name if one.call.name in tools else "unknown", one.failed) for one in observations]
        for what, called in (
            ("tool_calls", [name for name, _ in names]),
            ("tool_errors", [name for name, failed in names if failed]),
        ):
            if called:
                self._count(**{what: len(called)}, **{f"{what}/{name}": n for name, n in Counter(called).items()})

    def _count(self, **amounts: int) -> None:
        with self._counting:
            self._counts.update(amounts)


def _with_room(params: SamplingParams, room: int) -> SamplingParams:
    """For a turn of at most ``room`` tokens."""
    return replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))


def _next_turns(
    live: Sequence[_Live], max_tokens: int, with_room: Callable[[int], SamplingParams]
) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            one.conversation.next_prompt,
            with_room(max_tokens - len(one.conversation.token_ids)),
            n=1,
            seed=request_seed(one.seed, one.conversation.turns),
            conversation=one.conversation.name,
        )
        for one in live
    ]


def _tell(conversation: Conversation, told: Told, tokens: Sequence[int], *, most: int) -> bool:
    """Give the answers to the model; False where no room for a further turn would be left."""
    if len(conversation.token_ids) + len(tokens) >= most:
        conversation.finish_reason = "length"
        return False
    conversation.give(tokens)
    conversation.messages += told.messages
    return True
