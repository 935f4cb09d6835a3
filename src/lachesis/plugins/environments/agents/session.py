"""Record of one agent's rollout, token by token: one trajectory, or several if the agent began a new conversation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lachesis.common.errors import ConfigError
from lachesis.common.types import Completion, GenerationRequest, Message, SamplingParams
from lachesis.plugins.environments.agents.requests import Asked, AssistantCall, AssistantTurn, BadRequest, assistant
from lachesis.rollouts.generation import request_seed
from lachesis.rollouts.tools.conversation import Conversation
from lachesis.rollouts.tools.parsers import ToolParser
from lachesis.rollouts.tools.template import Continuation, call_id

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_MOST_TOOL_SETS = 32


@dataclass(slots=True)
class ContinuedTurns:
    """Turns whose prompts continue each other. ``known`` are all messages so far, the first ``given`` of them given."""

    conversation: Conversation
    tools: tuple[Mapping[str, Any], ...]
    known: list[Message]
    given: int

    @property
    def messages(self) -> list[Message]:
        """Messages after the first prompt, including the model's turns."""
        return self.known[self.given :]


@dataclass(frozen=True, slots=True)
class PreparedTurn:
    """A turn about to be sampled: of a new trajectory, or after ``added`` tokens of an existing one."""

    asked: Asked
    trajectory: ContinuedTurns
    added: tuple[int, ...]
    request: GenerationRequest
    new: bool


@dataclass(slots=True)
class AgentSession:
    """One rollout, by its key. Requests may overlap; the model's completed turns are recorded."""

    seed: int
    params: SamplingParams
    trajectories: list[ContinuedTurns] = field(default_factory=list[ContinuedTurns])
    responses: dict[str, tuple[Message, ...]] = field(default_factory=dict[str, tuple[Message, ...]])
    turns: int = 0
    calls: int = 0
    begun: int = 0
    closed: bool = False


class Recorder:
    """Makes prompts of agents' requests, and records the sampled turns.

    If a request repeats the messages of a trajectory, its last answer unchanged, and adds others, the prompt is that
    trajectory's sampled tokens plus the chat template's for the new messages. The same if the template's tokens
    happen to begin with all of a trajectory's. Otherwise a new trajectory begins.

    Args:
        max_context: most tokens of a trajectory.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        parse: ToolParser,
        template_kwargs: Mapping[str, Any],
        max_context: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._parse = parse
        self._kwargs = dict(template_kwargs)
        self._max_context = max_context
        self._continuations: dict[str, Continuation] = {}

    def prepare(self, session: AgentSession, asked: Asked) -> PreparedTurn:
        """Return the engine's request for a turn. Raises BadRequest if it cannot be rendered, or does not fit."""
        if not asked.messages:
            raise BadRequest("there are no messages")
        trajectory, added = self._place(session, asked)
        new = trajectory is None
        if trajectory is None:
            rendered = tuple(self.render(asked))
            trajectory = ContinuedTurns(Conversation(rendered), asked.tools, list(asked.messages), len(asked.messages))
        prompt = trajectory.conversation.next_prompt + added
        room = self._max_context - len(prompt)
        if room < 1:
            raise BadRequest(
                f"this model's maximum context length is {self._max_context} tokens, and there are {len(prompt)}",
                code="context_length_exceeded",
            )
        params = session.params
        wanted = min(room, params.max_tokens, asked.max_tokens or room)
        fields = {name: getattr(params, name) for name in SamplingParams.__slots__}
        fields |= {"max_tokens": wanted, "min_tokens": min(params.min_tokens, wanted), "stop": params.stop + asked.stop}
        seed = request_seed(session.seed, session.begun)
        session.begun += 1
        request = GenerationRequest(prompt, SamplingParams(**fields), 1, seed, conversation=f"agent {session.seed}")
        return PreparedTurn(asked, trajectory, added, request, new)

    def record(self, session: AgentSession, prepared: PreparedTurn, completion: Completion) -> AssistantTurn:
        """Add a turn to its trajectory; if that has grown meanwhile, to a new one."""
        trajectory, asked = prepared.trajectory, prepared.asked
        before = len(prepared.request.prompt_ids) - len(prepared.added)
        if prepared.new or len(trajectory.conversation.next_prompt) != before:
            trajectory = ContinuedTurns(
                Conversation(prepared.request.prompt_ids), asked.tools, list(asked.messages), len(asked.messages)
            )
            session.trajectories.append(trajectory)
        else:
            trajectory.conversation.give(prepared.added)
            trajectory.known += asked.messages[len(trajectory.known) :]
        trajectory.conversation.sample(completion)
        content, calls = self._read(session, completion, asked.tools)
        trajectory.known.append(assistant(content, [(call.id, call.name, call.arguments) for call in calls]))
        trajectory.conversation.calls += len(calls)
        session.turns += 1
        turn = AssistantTurn(
            content=content,
            calls=calls,
            finish_reason=completion.finish_reason,
            prompt_tokens=len(prepared.request.prompt_ids),
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
        """Return the trajectory that a request continues, and the new tokens; None if it begins a new one."""
        for trajectory in reversed(session.trajectories):
            known = trajectory.known
            new = asked.messages[len(known) :]
            if new and trajectory.tools == asked.tools and _alike(known, asked.messages[: len(known)]):
                end = trajectory.conversation.token_ids[-1] == self._tokenizer.eos_token_id
                return trajectory, tuple(self._continuation(asked).tokens(known[-1], new, ended=end))
        if session.trajectories:
            rendered = tuple(self.render(asked))
            for trajectory in reversed(session.trajectories):
                sampled = trajectory.conversation.next_prompt
                if rendered[: len(sampled)] == sampled and len(asked.messages) > len(trajectory.known):
                    return trajectory, rendered[len(sampled) :]
        return None, ()

    def _continuation(self, asked: Asked) -> Continuation:
        """One for all turns that are told of the same tools."""
        key = json.dumps(asked.tools, default=repr)
        if (known := self._continuations.get(key)) is None:
            if len(self._continuations) >= _MOST_TOOL_SETS:
                self._continuations.clear()
            known = self._continuations[key] = Continuation(self._tokenizer, self._variables(asked))
        return known

    def _variables(self, asked: Asked) -> dict[str, Any]:
        return self._kwargs | ({"tools": [dict(tool) for tool in asked.tools]} if asked.tools else {})

    def _read(
        self, session: AgentSession, completion: Completion, tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, tuple[AssistantCall, ...]]:
        """Return the text and calls of a turn; a malformed call stays part of the text, as agents expect."""
        ids = list(completion.token_ids)
        if ids and ids[-1] == self._tokenizer.eos_token_id:
            ids.pop()
        text = str(self._tokenizer.decode(ids, skip_special_tokens=False))
        parsed = self._parse(text, tools)
        if any(call.error for call in parsed.calls):
            return text, ()
        first, session.calls = session.calls, session.calls + len(parsed.calls)
        calls = [
            AssistantCall(call_id(first + number), call.name, call.arguments)
            for number, call in enumerate(parsed.calls)
        ]
        return parsed.content, tuple(calls)


def _alike(known: Sequence[Message], given: Sequence[Message]) -> bool:
    return len(known) == len(given) and all(_essence(a) == _essence(b) for a, b in zip(known, given, strict=True))


def _essence(message: Message) -> tuple[Any, ...]:
    """Return what identifies a message: without the ids of calls, and without surrounding white space."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return message["role"], str(message["content"]).strip(), calls
