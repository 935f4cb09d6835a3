"""Server before a run's engine, for environments that use HTTP; it keeps every sampled turn."""

from __future__ import annotations

import logging
import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lachesis.common.deadline import Deadline
from lachesis.common.errors import LachesisError
from lachesis.common.hosts import OwnHostOnly
from lachesis.common.http import LoopServer
from lachesis.common.types import Completion, GenerationRequest, Sample, SamplingParams
from lachesis.engines.serving.bodies import Refused, parse
from lachesis.engines.serving.generation import GenerateBody
from lachesis.engines.serving.server import guarded, read_body, while_connected
from lachesis.engines.serving.tokens import TokensAnswer, TokensBody, generate_body, token_choice
from lachesis.rollouts.call_batcher import Completer
from lachesis.rollouts.generation import TextDecoder, request_seed
from lachesis.rollouts.tools.conversation import Conversation

logger = logging.getLogger(__name__)

SESSION = "x-session-id"
"""Header with the id of a request's conversation."""
MODEL = "policy"
_FIELDS = frozenset({
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "max_tokens", "min_tokens", "seed", "stop", "stop_token_ids", "skip_special_tokens", "detokenize",
})  # fmt: skip
_PARAMS = _FIELDS - {"seed", "skip_special_tokens", "detokenize"}


@dataclass(frozen=True, slots=True)
class Turn:
    """Completion as the engine sampled it, with the prompt that it was asked to continue."""

    prompt_ids: tuple[int, ...]
    completion: Completion


class ModelServer:
    """Server in front of a run's engine, on its own port. Its coroutines run on one event loop.

    ``failure`` is an error of the engine since :meth:`begin`, which no rollout caused.
    """

    def __init__(self, calls: Completer, app: Starlette, *, host: str = "127.0.0.1") -> None:
        self.calls = calls
        self.failure: LachesisError | None = None
        self._server = LoopServer(app, host=host)

    @property
    def url(self) -> str:
        """Address of the server; empty before :meth:`start`."""
        return self._server.url

    async def start(self) -> None:
        """Listen on a free port."""
        await self._server.start()

    async def stop(self) -> None:
        """Close the port, and wait for the engine's last call. Idempotent."""
        await self._server.stop()
        await self.calls.stop()

    def begin(self, deadline: Deadline) -> None:
        """Prepare for more rollouts: set a new deadline for the engine's calls, and forget its earlier error."""
        self.calls.deadline = deadline
        self.failure = None

    def check(self) -> None:
        """Raise the engine's error, if there was one: the rollout that failed is then not to blame."""
        if self.failure is not None:
            raise self.failure


def models_answer(**facts: int) -> JSONResponse:
    """Return the list of models: the policy alone, with ``facts`` about it."""
    card = {"id": MODEL, "object": "model", "created": 0, "owned_by": "lachesis"}
    return JSONResponse({"object": "list", "data": [card | facts]})


class TurnServer(ModelServer):
    """Server of ``/inference/v1/generate`` over any engine.

    Args:
        calls: the engine's calls, which complete prompts.
        params: defaults of requests; ``max_tokens`` is the limit of one turn.
        max_context: most tokens of prompt and completion together; the last turn gets what is left.
        vocab_size: limit of the token ids of prompts.
    """

    def __init__(self, calls: Completer, *, params: SamplingParams, max_context: int, vocab_size: int) -> None:
        super().__init__(calls, self.app())
        self._params = params
        self._max_context = max_context
        self._vocab_size = vocab_size
        self._turns: defaultdict[str, list[Turn]] = defaultdict(list)

    def app(self) -> Starlette:
        """Application of the server, which answers only to this machine's names."""
        routes = [
            Route("/inference/v1/generate", guarded(self._generate), methods=["POST"]),
            Route("/v1/models", guarded(self._models), methods=["GET"]),
        ]
        return Starlette(routes=routes, middleware=[Middleware(OwnHostOnly)])

    def take(self, session: str) -> tuple[Turn, ...]:
        """Return the turns of a conversation, and forget it."""
        return tuple(self._turns.pop(session, ()))

    async def _models(self, request: Request) -> Response:
        return models_answer(max_model_len=self._max_context)

    async def _generate(self, request: Request) -> Response:
        body = parse(TokensBody, await read_body(request))
        wanted = generate_body(body, sampling_fields=_FIELDS)
        session = request.headers.get(SESSION, "")
        if not session:
            raise Refused("the request does not name its conversation", remedy=f"send the header {SESSION}")
        asked = replace(self._request(wanted, turn=len(self._turns[session])), conversation=session)
        try:
            completion = await while_connected(request, self.calls.complete(asked))
        except LachesisError as error:
            if not isinstance(error, Refused):
                self.failure = error
            raise
        self._turns[session].append(Turn(asked.prompt_ids, completion))
        answer = TokensAnswer(
            request_id=wanted.request_id or uuid.uuid4().hex,
            prompt_token_ids=asked.prompt_ids,
            choices=[token_choice(completion, index=0)],
        )
        return JSONResponse(answer.model_dump(mode="json"))

    def _request(self, wanted: GenerateBody, *, turn: int) -> GenerationRequest:
        """Return the engine's request. Raises Refused (400) if the prompt leaves no room for a token."""
        prompt_ids = wanted.prompt_token_ids or ()
        room = self._max_context - len(prompt_ids)
        if room < 1:
            raise Refused(
                f"the prompt has {len(prompt_ids)} tokens; this model's maximum context length is "
                f"{self._max_context} tokens",
                remedy="end the conversation earlier",
            )
        if max(prompt_ids) >= self._vocab_size:
            raise Refused(
                f"token id {max(prompt_ids)} is not below {self._vocab_size}", remedy="use the model's tokenizer"
            )
        if wanted.n != 1:
            raise Refused(f"n is {wanted.n}: a turn has one completion", remedy="leave n out")
        given = {name: value for name, value in wanted.sampling.items() if name in _PARAMS}
        given |= {name: tuple(given[name]) for name in ("stop", "stop_token_ids") if name in given}
        given["max_tokens"] = min(room, self._params.max_tokens, given.get("max_tokens", room))
        given["top_k"] = max(0, given.get("top_k", self._params.top_k))
        seed = request_seed(wanted.sampling.get("seed", 0), turn)
        return GenerationRequest(prompt_ids, replace(self._params, **given), n=1, seed=seed)


def joined(turns: Sequence[Turn], *, decode: TextDecoder, temperature: float) -> list[Sample]:
    """Join the turns of a conversation to samples without rewards: several if a prompt does not continue the last.

    A prompt continues if it begins with all tokens before it; the tokens that it adds are masked. A sample begins with
    the prompt of its first turn.
    """
    conversations: list[Conversation] = []
    for turn in turns:
        known = conversations[-1].next_prompt if conversations else ()
        if not conversations or turn.prompt_ids[: len(known)] != known:
            conversations.append(Conversation(turn.prompt_ids))
        conversation = conversations[-1]
        conversation.give(turn.prompt_ids[len(conversation.next_prompt) :])
        conversation.sample(turn.completion)
    return [one.as_sample(text=decode([one.token_ids])[0], temperature=temperature) for one in conversations]
