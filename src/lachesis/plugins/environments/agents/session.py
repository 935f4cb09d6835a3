"""Record of one agent's rollout, token by token: one trajectory, or several if the agent began a new conversation."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from lachesis.common.errors import ConfigError
from lachesis.common.types import Completion, GenerationRequest, Message, SamplingParams
from lachesis.plugins.environments.agents.requests import Asked, AssistantCall, AssistantTurn, BadRequest, assistant
from lachesis.rollouts.generation import request_seed
from lachesis.rollouts.tools.conversation import Conversation
from lachesis.rollouts.tools.parsers import ToolParser, hermes, hermes_opening
from lachesis.rollouts.tools.template import Continuation, call_id

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

_MOST_TOOL_SETS = 32
_LONGEST_TOKEN = 128  # characters


@dataclass(slots=True)
class ContinuedTurns:
    """Turns whose prompts continue each other. ``known`` are all messages so far, the first ``given`` of them given."""

    conversation: Conversation
    tools: tuple[Mapping[str, Any], ...]
    known: list[Message]
    given: int
    ends: list[TurnEnd] = field(default_factory=list["TurnEnd"])

    @property
    def messages(self) -> list[Message]:
        """Messages after the first prompt, including the model's turns."""
        return self.known[self.given :]

    def shared(self, messages: Sequence[Message]) -> TurnEnd | None:
        """Return the last turn of the model that ``messages`` repeat with all before it, if others follow it."""
        alike = 0
        for known, given in zip(self.known, messages, strict=False):
            if _essence(known) != _essence(given):
                break
            alike += 1
        most = min(alike, len(messages) - 1)
        return next((end for end in reversed(self.ends) if end.messages <= most), None)


class TurnEnd(NamedTuple):
    """Numbers of messages and tokens up to and including a turn of the model."""

    messages: int
    tokens: int


@dataclass(frozen=True, slots=True)
class PreparedTurn:
    """A turn about to be sampled, once for each answer: of a new trajectory, or after ``before`` tokens of another.

    ``opening`` is the text with which the turn is forced to begin: the last tokens of the prompt.
    """

    asked: Asked
    trajectory: ContinuedTurns | None
    before: int
    opening: str
    requests: tuple[GenerationRequest, ...]


@dataclass(slots=True)
class AgentSession:
    """Rollout of an agent, identified by its key. Requests may overlap; the model's completed turns are recorded."""

    seed: int
    params: SamplingParams
    trajectories: list[ContinuedTurns] = field(default_factory=list[ContinuedTurns])
    responses: dict[str, tuple[Message, ...]] = field(default_factory=dict[str, tuple[Message, ...]])
    turns: int = 0
    calls: int = 0
    begun: int = 0
    closed: bool = False


@dataclass(eq=False)
class Recorder:
    """Recorder that turns agents' requests into prompts, and records the sampled turns.

    If a request repeats the messages of a trajectory, with its last answer unchanged, and adds others, the prompt is
    that trajectory's sampled tokens plus the chat template's for the new messages. The same holds if the template's
    tokens begin with all tokens of a trajectory. A request that continues from an earlier turn starts a new trajectory,
    whose prompt is the sampled tokens up to there: they are trained once, and computed once if prefixes are shared.
    Otherwise a new trajectory begins with the template's tokens.

    A turn that must call a tool, or be JSON, is given its first tokens, which are not trained; the last message has the
    schema. The model is forced in no other way.

    Args:
        max_context: most tokens of a trajectory.
    """

    tokenizer: PreTrainedTokenizerBase
    _: KW_ONLY
    parse: ToolParser
    template_kwargs: Mapping[str, Any]
    max_context: int

    def __post_init__(self) -> None:
        self._opens = self.parse is hermes
        self._continuations: dict[str, Continuation] = {}

    def prepare(self, session: AgentSession, asked: Asked) -> PreparedTurn:
        """Return the engine's request for a turn. Raises BadRequest if it cannot be rendered, or does not fit."""
        if not asked.messages:
            raise BadRequest("there are no messages")
        trajectory, prompt = self._place(session, replace(asked, messages=_told(asked)))
        before = len(trajectory.conversation.next_prompt) if trajectory is not None else 0
        opening = self._opening(asked)
        prompt += tuple(self.tokenizer(opening, add_special_tokens=False)["input_ids"]) if opening else ()
        room = self.max_context - len(prompt)
        if room < 1:
            raise BadRequest(
                f"this model's maximum context length is {self.max_context} tokens, and there are {len(prompt)}",
                code="context_length_exceeded",
            )
        params = session.params
        wanted = min(room, params.max_tokens, asked.max_tokens or room)
        fields = {name: getattr(params, name) for name in SamplingParams.__slots__}
        fields |= {"max_tokens": wanted, "min_tokens": min(params.min_tokens, wanted), "stop": params.stop + asked.stop}
        numbers = range(session.begun, session.begun + asked.n)
        session.begun += asked.n
        requests = tuple(
            GenerationRequest(
                prompt, SamplingParams(**fields), 1, request_seed(session.seed, number),
                conversation=f"agent {session.seed}",
            )
            for number in numbers
        )  # fmt: skip
        return PreparedTurn(asked, trajectory, before, opening, requests)

    def record(self, session: AgentSession, prepared: PreparedTurn, completion: Completion) -> AssistantTurn:
        """Add a turn to its trajectory; if that has grown meanwhile, or has another answer, to a new one."""
        trajectory, asked, prompt = prepared.trajectory, prepared.asked, prepared.requests[0].prompt_ids
        if trajectory is None or len(trajectory.conversation.next_prompt) != prepared.before:
            trajectory = ContinuedTurns(Conversation(prompt), asked.tools, list(asked.messages), len(asked.messages))
            session.trajectories.append(trajectory)
        else:
            trajectory.conversation.give(prompt[prepared.before :])
            trajectory.known += asked.messages[len(trajectory.known) :]
        trajectory.conversation.sample(completion)
        content, calls = self._read(session, prepared.opening, completion, asked.tools)
        trajectory.known.append(assistant(content, [(call.id, call.name, call.arguments) for call in calls]))
        trajectory.ends.append(TurnEnd(len(trajectory.known), len(trajectory.conversation.next_prompt)))
        trajectory.conversation.calls += len(calls)
        session.turns += 1
        turn = AssistantTurn(
            content=content,
            calls=calls,
            finish_reason=completion.finish_reason,
            prompt_tokens=len(prompt),
            tokens=len(completion.token_ids),
            model=asked.model,
        )
        session.responses[f"resp_{turn.id}"] = (*asked.messages, trajectory.known[-1])
        return turn

    def render(self, asked: Asked) -> list[int]:
        """Return the template's tokens of all messages. Raises BadRequest."""
        try:
            return list(self._continuation(asked).whole(asked.messages))
        except ConfigError as error:
            raise BadRequest(error.message) from error

    def _place(self, session: AgentSession, asked: Asked) -> tuple[ContinuedTurns | None, tuple[int, ...]]:
        """Return the prompt of a request, and the trajectory that it continues; None if it begins a new one."""
        branch: tuple[ContinuedTurns, TurnEnd] | None = None
        for trajectory in reversed(session.trajectories):
            end = trajectory.shared(asked.messages) if trajectory.tools == asked.tools else None
            if end is not None and end is trajectory.ends[-1]:
                return trajectory, self._after(trajectory, end, asked)
            if end is not None and (branch is None or end.messages > branch[1].messages):
                branch = trajectory, end
        rendered = tuple(self.render(asked))
        for trajectory in reversed(session.trajectories):
            sampled = trajectory.conversation.next_prompt
            if rendered[: len(sampled)] == sampled and len(asked.messages) > len(trajectory.known):
                return trajectory, rendered
        return None, rendered if branch is None else self._after(*branch, asked)

    def _after(self, trajectory: ContinuedTurns, end: TurnEnd, asked: Asked) -> tuple[int, ...]:
        """Return a trajectory's tokens up to the end of a turn, and the template's for the messages that follow."""
        sampled = trajectory.conversation.next_prompt[: end.tokens]
        ended = sampled[-1] == self.tokenizer.eos_token_id
        answer, new = trajectory.known[end.messages - 1], asked.messages[end.messages :]
        try:
            return sampled + tuple(self._continuation(asked).tokens(answer, new, ended=ended))
        except ConfigError as error:
            raise BadRequest(error.message) from error

    def _opening(self, asked: Asked) -> str:
        """Return the text with which a turn must begin; empty if the model chooses."""
        if asked.forced is None:
            return "" if asked.schema is None else "{"
        if not self._opens:
            logger.warning("tool_choice asks for a call: only the format hermes can force one, so it is optional")
            return ""
        names = [tool["function"]["name"] for tool in asked.tools]
        return hermes_opening(asked.forced or (names[0] if len(names) == 1 else ""))

    def _continuation(self, asked: Asked) -> Continuation:
        """Return the continuation of turns with these tools. Raises BadRequest if rendering it would take long."""
        key = json.dumps(asked.tools, default=repr)
        letters = len(key) + sum(len(str(message)) for message in asked.messages)
        if letters > self.max_context * _LONGEST_TOKEN or len(asked.messages) > self.max_context:
            raise BadRequest(
                f"this model's maximum context length is {self.max_context} tokens, and {len(asked.messages)} messages "
                f"and their tools have {letters} characters",
                code="context_length_exceeded",
            )
        if (known := self._continuations.get(key)) is None:
            if len(self._continuations) >= _MOST_TOOL_SETS:
                self._continuations.clear()
            known = self._continuations[key] = Continuation(self.tokenizer, self._variables(asked))
        return known

    def _variables(self, asked: Asked) -> dict[str, Any]:
        return dict(self.template_kwargs) | ({"tools": [dict(tool) for tool in asked.tools]} if asked.tools else {})

    def _read(
        self, session: AgentSession, opening: str, completion: Completion, tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, tuple[AssistantCall, ...]]:
        """Return the text and calls of a turn; a malformed call stays part of the text, as agents expect."""
        ids = list(completion.token_ids)
        if ids and ids[-1] == self.tokenizer.eos_token_id:
            ids.pop()
        text = opening + str(self.tokenizer.decode(ids, skip_special_tokens=False))
        parsed = self.parse(text, tools)
        if any(call.error for call in parsed.calls):
            return text, ()
        first, session.calls = session.calls, session.calls + len(parsed.calls)
        calls = [
            AssistantCall(call_id(first + number), call.name, call.arguments)
            for number, call in enumerate(parsed.calls)
        ]
        return parsed.content, tuple(calls)


def _told(asked: Asked) -> tuple[Message, ...]:
    """Return the messages, the last with the schema that the answer has to fit."""
    if asked.schema is None:
        return asked.messages
    *before, last = asked.messages
    of = f" of this schema: {json.dumps(asked.schema, ensure_ascii=False)}" if asked.schema else ""
    return (*before, {**last, "content": f"{last['content']}\n\nAnswer with JSON{of}"})


def _essence(message: Message) -> tuple[Any, ...]:
    """Return a message for comparison: without ids of calls and surrounding white space."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return message["role"], str(message["content"]).strip(), calls
