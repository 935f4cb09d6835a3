"""Rollouts of several turns in which the model calls tools."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from lachesis.common.deadline import Deadline
from lachesis.common.errors import DataError, EngineError
from lachesis.common.prompt_images import PromptImages, with_later
from lachesis.common.types import Completion, GenerationRequest, Message, Prompt, SamplingParams
from lachesis.metrics.meters import Tally
from lachesis.rollouts.call_batcher import CallBatcher
from lachesis.rollouts.datasets.problems import ImageReader
from lachesis.rollouts.episodes import Play, Played, Players, RolloutFailed
from lachesis.rollouts.generation import TextDecoder, request_seed, text_decoder
from lachesis.rollouts.rewards.attempts import TURNS
from lachesis.rollouts.tools.conversation import Conversation
from lachesis.rollouts.tools.memo import Remembered
from lachesis.rollouts.tools.parsers import ParsedTurn, ToolParser
from lachesis.rollouts.tools.template import Continuation, Told, answer_message, short_token_ids
from lachesis.rollouts.tools.toolbox import Observation, Toolbox

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# The number of remembered answers of tools.
_KEPT = 4096
# The cause of rollouts that failed because a tool's server was lost.
_LOST = "tool_server"
# The causes of rollouts in which a tool answered with a token that stands for an image, or with a broken image.
_MARK, _IMAGE = "image_token", "image"


@dataclass(frozen=True, slots=True)
class TurnLimits:
    """Limits of a rollout: turns of the model, tokens of one answer of a tool, seconds (``None``: any)."""

    turns: int
    result_tokens: int
    seconds: float | None = None


class _Said:
    """Content of a turn of the model, which equal turns of all rollouts share; nothing changes it."""

    def __init__(self, turn: ParsedTurn) -> None:
        self.calls = turn.calls
        self._content = turn.content
        self._messages: dict[int, Message] = {}

    def message(self, first: int) -> Message:
        """Return the turn as a message, whose calls are numbered from ``first`` on."""
        if (known := self._messages.get(first)) is not None:
            return known
        calls = [(call.name, call.arguments) for call in self.calls]
        return self._messages.setdefault(first, answer_message(self._content, calls, first=first))


@dataclass(frozen=True, slots=True, eq=False)
class _Rollout:
    """A rollout in progress. ``seed`` is its own, and ``end`` the moment after which no turn begins."""

    conversation: Conversation
    params: SamplingParams
    seed: int
    end: float | None
    images: PromptImages | None


@dataclass(kw_only=True, eq=False)
class ToolPlayers(Players):
    """Players of rollouts in which the model calls tools.

    A turn's prompt consists of the sampled tokens so far and the chat template's tokens for the answers of the tools.
    The tokens of all turns and answers together are at most ``max_tokens`` of the sampling parameters. A call in the
    last allowed turn is not answered, since no turn would read the answer. A rollout fails if a tool's server breaks
    off, or if a tool's answer has one of the ``placeholders`` of images or an image that cannot be read; a turn that
    samples a placeholder is the last. ``images`` reads the images of answers, if the model is shown images.

    Raises:
        DataError: a prompt is a text, which cannot describe the tools to the model.
        ConfigError: the chat template cannot render an answer, a parser of the user failed, or a tool answered with an
            image that the model cannot be shown.
        EngineError, DeadlineExceeded.
    """

    calls: CallBatcher
    params: SamplingParams
    toolbox: Toolbox
    parse: ToolParser
    continuation: Continuation
    tokenizer: PreTrainedTokenizerBase
    decode: TextDecoder
    limits: TurnLimits
    placeholders: frozenset[int] = frozenset()
    images: ImageReader | None = None
    counts: Tally = field(default_factory=Tally)

    columns = ("turns", "tool_calls")

    def __post_init__(self) -> None:
        self._end_token = self.tokenizer.eos_token_id  # kept, because the library looks it up on every access
        self._decoded = text_decoder(self.tokenizer, as_sampled=False)
        # Rollouts of a prompt often contain the same turns and the same answers.
        self._parsed = Remembered(self._turns, most=_KEPT)
        self._shortened = Remembered(self._cut, most=_KEPT)

    async def begin(self, prompt: Prompt, *, seed: int, numbers: Sequence[int], greedy: bool = False) -> Sequence[Play]:
        """Sample the first turn of all rollouts as it would be without tools: as completions of one request."""
        if prompt.messages is None:
            raise DataError(
                f"prompt {prompt.id!r} is a text, but tools need a conversation",
                remedy="write prompts as lists of messages, or set data.system_prompt",
            )
        params = replace(self.params, temperature=0.0) if greedy else self.params
        end = None if self.limits.seconds is None else time.monotonic() + self.limits.seconds
        # If other rollouts of the group exist already, the group's seed might repeat one of them.
        first = seed if list(numbers) == list(range(len(numbers))) else request_seed(seed, -1 - numbers[-1])
        name = f"tools {seed}"
        request = GenerationRequest(prompt.token_ids, params, len(numbers), first, name, prompt.images)
        answers = await self._sampled(request)
        plays: list[Play] = []
        for number, completion in zip(numbers, answers, strict=True):
            conversation = Conversation(prompt.token_ids, name=name)
            conversation.sample(completion)
            rollout = _Rollout(conversation, params, request_seed(seed, number), end, prompt.images)
            plays.append(partial(self._go_on, rollout))
        return plays

    async def play(self, prompt: Prompt, *, seed: int, greedy: bool = False) -> Played:
        (play,) = await self.begin(prompt, seed=seed, numbers=[0], greedy=greedy)
        return await play()

    async def stop(self) -> None:
        await self.toolbox.stop()
        await self.calls.stop()

    def report(self, deadline: Deadline) -> None:
        self.calls.deadline = deadline

    def take_counts(self) -> dict[str, float]:
        """Return ``turns``, ``tool_calls``, ``tool_errors``, and the last two for each tool, since the last call."""
        return self.counts.take("turns", "tool_calls", "tool_errors")

    async def _sampled(self, request: GenerationRequest) -> list[Completion]:
        answers = await self.calls.completions(request)
        if len(answers) != request.n or any(one.finish_reason == "abort" for one in answers):
            raise EngineError(
                "the engine aborted a turn, or returned too few completions for it",
                remedy="read the engine's log; the request was valid",
            )
        self.counts.add(turns=len(answers))
        return answers

    async def _go_on(self, rollout: _Rollout) -> Played:
        """Play the turns after the first."""
        conversation = rollout.conversation
        while await self._answer(rollout):
            room = rollout.params.max_tokens - len(conversation.token_ids)
            request = GenerationRequest(
                conversation.next_prompt,
                replace(rollout.params, max_tokens=room, min_tokens=min(rollout.params.min_tokens, room)),
                n=1,
                seed=request_seed(rollout.seed, conversation.turns),
                conversation=conversation.name,
                images=with_later(rollout.images, conversation.images),
            )
            conversation.sample((await self._sampled(request))[0])
        (text,) = self.decode([conversation.token_ids])
        temperature = 1.0 if rollout.params.greedy else rollout.params.temperature
        return Played(
            (conversation.as_sample(text=text, temperature=temperature),),
            columns={TURNS: [conversation.messages], "turns": [conversation.turns], "tool_calls": [conversation.calls]},
        )

    async def _answer(self, rollout: _Rollout) -> bool:
        """Call the tools that the last turn asks for, and return True if another turn follows."""
        conversation = rollout.conversation
        turn = self._read(conversation)
        late = rollout.end is not None and time.monotonic() > rollout.end
        last = late or conversation.turns == self.limits.turns or conversation.finish_reason != "stop"
        last = last or not self.placeholders.isdisjoint(conversation.last_turn)
        conversation.messages.append(turn.message(conversation.calls))
        conversation.calls += len(turn.calls)
        if last or not turn.calls:
            return False
        observations = await self.toolbox.call_all(turn.calls)
        self._count_calls(observations)
        if lost := next((one for one in observations if one.lost), None):
            raise RolloutFailed(lost.text, cause=_LOST)
        told = self._told(conversation, observations)
        tokens, images = self._tokens(told, observations)
        if len(conversation.token_ids) + len(tokens) >= rollout.params.max_tokens:  # without room for a further turn
            conversation.finish_reason = "length"
            return False
        conversation.give(tokens, images)
        for message, one in zip(told.messages, observations, strict=True):
            conversation.messages.append({**message, "content": one.parts} if one.parts else message)
        return True

    def _read(self, conversation: Conversation) -> _Said:
        """Read the last turn."""
        ids = conversation.last_turn
        (said,) = self._parsed([ids[:-1] if ids and ids[-1] == self._end_token else ids])
        return said

    def _turns(self, turns: Sequence[Sequence[int]]) -> list[_Said]:
        """Read turns. Special tokens are part of the text, as some models write calls with them."""
        schemas = self.toolbox.schemas
        return [_Said(self.parse(text, schemas)) for text in self._decoded(turns)]

    def _cut(self, texts: Sequence[str]) -> list[str]:
        """Shorten answers to the maximum number of tokens of a tool's answer."""
        tokenized = short_token_ids(self.tokenizer, texts)
        most = self.limits.result_tokens
        return [
            text if len(ids) <= most else f"{self._decoded([ids[:most]])[0]} ... (cut)"
            for text, ids in zip(texts, tokenized, strict=True)
        ]

    def _told(self, conversation: Conversation, seen: Sequence[Observation]) -> Told:
        """Return the answers to the calls in a conversation's last message, with as much text as there is room for."""
        answer = conversation.messages[-1]
        ids = [call["id"] for call in answer["tool_calls"]]
        named = [one.message(self._content(one), tool_call_id=name) for one, name in zip(seen, ids, strict=True)]
        return Told(answer, named, ended=conversation.token_ids[-1] == self._end_token, ids=ids)

    def _content(self, seen: Observation) -> str | list[Message]:
        """Return an answer as the chat template gets it, with a placeholder for each image."""
        if not seen.parts:
            return self._shortened([seen.text])[0]
        texts = iter(self._shortened([part["text"] for part in seen.parts if part["type"] == "text"]))
        return [
            {"type": "text", "text": next(texts)} if part["type"] == "text" else {"type": "image"}
            for part in seen.parts
        ]

    def _tokens(self, told: Told, seen: Sequence[Observation]) -> tuple[Sequence[int], PromptImages | None]:
        """Return the tokens of answers up to the model's next turn, and the inputs of their images, if any."""
        given = [part for one in seen for part in one.parts if part["type"] == "image"]
        if not given:
            (tokens,) = self.continuation.tokens_of([told])
            if marks := self.placeholders.intersection(tokens):
                mark = self.tokenizer.convert_ids_to_tokens(min(marks))
                raise RolloutFailed(f"a tool's answer has the token {mark!r}, which stands for an image", cause=_MARK)
            return tokens, None
        assert self.images is not None, "the toolbox refuses images otherwise"
        (text,) = self.continuation.texts_of([told])
        try:
            return self.images.answer(text, messages=told.messages, given=given)
        except DataError as error:
            raise RolloutFailed(error.message, cause=_IMAGE) from error

    def _count_calls(self, observations: Sequence[Observation]) -> None:
        tools = {tool.name for tool in self.toolbox.tools}
        names = [(one.call.name if one.call.name in tools else "unknown", one.failed) for one in observations]
        for what, called in (
            ("tool_calls", [name for name, _ in names]),
            ("tool_errors", [name for name, failed in names if failed]),
        ):
            if called:
                self.counts.add(**{what: len(called)}, **{f"{what}/{name}": n for name, n in Counter(called).items()})
