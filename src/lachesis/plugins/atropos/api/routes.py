"""The endpoints, which pass requests to the state and its store, and answer them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from lachesis.plugins.atropos.api.bodies import RECORD_BYTES, read_body, reply, reply_with
from lachesis.plugins.atropos.api.entries import Change, RolloutBatch, StoredGroup
from lachesis.plugins.atropos.api.journal import Journal, StoreFailed
from lachesis.plugins.atropos.api.reading import GroupReader
from lachesis.plugins.atropos.api.state import RolloutState
from lachesis.plugins.atropos.api.wire import (
    HOLDS_HEADER,
    KEY_HEADER,
    TRAINER_HEADER,
    Acknowledgement,
    EnvIdentifier,
    EnvRegistration,
    Goodbye,
    Record,
    Refusal,
    Registration,
    TrainerIdentifier,
    WrongGroup,
    parse_record,
)

Answer = TypeVar("Answer")

# Seconds for which changes are refused after a failed write.
RECOVERY_S = 5
_KEY_LENGTH, _DIGITS = 200, 60

_NO_EXAMPLE = (
    "tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params", "inference_logprobs", "messages",
    "images",
)  # fmt: skip
_UNREGISTERED: dict[str, Any] = {
    "status": "error",
    "message": "Trainer not registered. Call /register first.",
    "batch": [],
}


@dataclass(slots=True)
class Endpoints:
    """Handlers over one state. Without a ``journal`` the state ends with the process."""

    state: RolloutState
    reader: GroupReader
    journal: Journal | None
    max_body: int
    failure: str = ""
    failing_until: float = 0.0

    def routes(self) -> list[Route]:
        """Return all endpoints, without HEAD: GET /batch and GET /reset_data change the state."""
        handlers: list[tuple[str, str, Callable[[Request], Awaitable[Response | Handover]]]] = [
            ("GET", "/", self.root),
            ("POST", "/register", self.register),
            ("GET", "/info", self.info),
            ("GET", "/wandb_info", self.wandb_info),
            ("GET", "/status", self.status),
            ("POST", "/register-env", self.register_env),
            ("GET", "/status-env", self.status_env),
            ("POST", "/disconnect-env", self.disconnect_env),
            ("POST", "/scored_data", partial(self.scored_data, single=True)),
            ("POST", "/scored_data_list", partial(self.scored_data, single=False)),
            ("GET", "/batch", self.batch),
            ("POST", "/batch/ack", self.acknowledge),
            ("POST", "/disconnect", self.disconnect),
            ("GET", "/latest_example", self.latest_example),
            ("GET", "/reset_data", self.reset_data),
            ("GET", "/set_aside", self.set_aside),
            ("GET", "/overview", self.overview),
            ("GET", "/healthz", self.healthz),
        ]
        routes = [Route(path, handler, methods=[method]) for method, path, handler in handlers]
        for route in routes:
            (route.methods or set()).discard("HEAD")
        return routes

    # -- the protocol: trainers

    async def root(self, request: Request) -> Response:
        return reply_with({"message": "AtroposLib API"})

    async def register(self, request: Request) -> Response:
        asked = await self._record(Registration, request)
        trainer = self._apply(lambda: self.state.register(asked))
        if not asked.acknowledge:
            return reply_with({"uuid": trainer})
        return reply_with(
            {
                "uuid": trainer,
                "ack_timeout_s": self.state.limits.ack_timeout_s,
                "current_step": self.state.step,
                "outstanding": list(self.state.deliveries.outstanding),
            }
        )

    async def info(self, request: Request) -> Response:
        asked = self.state.registration
        return reply_with(
            {"batch_size": asked.batch_size if asked else -1, "max_token_len": asked.max_token_len if asked else -1}
        )

    async def wandb_info(self, request: Request) -> Response:
        asked = self.state.registration
        return reply_with(
            {"group": asked.wandb_group if asked else None, "project": asked.wandb_project if asked else None}
        )

    async def status(self, request: Request) -> Response:
        return reply_with(self.state.status())

    async def batch(self, request: Request) -> Response | Handover:
        if self.state.registration is None:
            return reply_with(_UNREGISTERED)
        if await request.is_disconnected():
            raise Refusal(499, "the client went away", plain=True)
        named = request.headers.get(TRAINER_HEADER)
        if named is not None:
            return await self._batch_to_acknowledge(request, named)
        batch = self._apply(lambda: self.state.next_batch(_now()))
        if batch is None:
            return reply_with({"batch": None})
        epoch = self.state.epoch
        response = await reply(request, b'{"batch":[' + _joined(batch) + b"]}")
        return Handover(response, lambda: self._apply(lambda: (None, self.state.put_back(batch, epoch=epoch))))

    async def _batch_to_acknowledge(self, request: Request, named: str) -> Response:
        trainer, listed = _number(named, TRAINER_HEADER), request.headers.get(HOLDS_HEADER)
        holds = None if listed is None else {_number(part, HOLDS_HEADER) for part in listed.split(",") if part.strip()}
        batch = self._apply(lambda: self.state.next_batch_for(trainer, holds, _now()))
        if batch is None:
            return reply_with({"batch": None, "waiting": self.state.waiting(_now())})
        tail = b'],"batch_id":%d,"deliveries":%d}' % (batch.id, batch.deliveries)
        return await reply(request, b'{"batch":[' + _joined(batch) + tail)

    async def acknowledge(self, request: Request) -> Response:
        asked = await self._record(Acknowledgement, request)
        return reply_with(self._apply(lambda: self.state.acknowledge(asked.uuid, asked.batch_ids)))

    async def disconnect(self, request: Request) -> Response:
        asked = await self._record(TrainerIdentifier, request)
        self._apply(lambda: (None, self.state.forget_trainer(asked.uuid)))
        return reply_with({"status": "success"})

    # -- the protocol: environments

    async def register_env(self, request: Request) -> Response:
        asked = await self._record(EnvRegistration, request)
        return reply_with(self._apply(lambda: self.state.register_env(asked, _now())))

    async def status_env(self, request: Request) -> Response:
        asked = await self._record(EnvIdentifier, request)
        return reply_with(self.state.status_env(asked.env_id, _now()))

    async def disconnect_env(self, request: Request) -> Response:
        asked = await self._record(Goodbye, request)
        return reply_with(self._apply(lambda: self.state.disconnect_env(asked.env_id, reason=asked.reason)))

    async def scored_data(self, request: Request, *, single: bool) -> Response:
        """Accept groups. A post that repeats the idempotency key of an earlier one gets the earlier reply."""
        body, key = await read_body(request, limit=self.max_body), request.headers.get(KEY_HEADER, "")
        if len(key) > _KEY_LENGTH:
            raise Refusal(422, f"{KEY_HEADER}: longer than {_KEY_LENGTH} characters")
        known = self.state.receipt(key) if key else None
        if known is not None:
            return Response(known, media_type="application/json")
        read = await self.reader.read(body.content, single=single)

        def once() -> tuple[Response, Change | None]:
            # The same post may have been accepted while this one was read.
            known = self.state.receipt(key) if key else None
            if known is not None:
                return Response(known, media_type="application/json"), None
            answers, change = self.state.post([group for group in read if isinstance(group, StoredGroup)], _now())
            response = reply_with(answers[0] if single else _in_all(read, answers))
            if single and change.added:
                change = replace(change, packed=body.packed)
            if key:
                self.state.remember(key, bytes(response.body))
                change = replace(change, receipts=((key, bytes(response.body)),))
            return response, change

        return self._apply(once)

    async def latest_example(self, request: Request) -> Response:
        latest = self.state.backlog.latest
        return await reply(request, latest.group.json) if latest else reply_with({name: [] for name in _NO_EXAMPLE})

    async def reset_data(self, request: Request) -> Response:
        self._apply(lambda: (None, self.state.reset()))
        return PlainTextResponse("Reset successful")

    # -- Lachesis's own

    async def set_aside(self, request: Request) -> Response:
        return await reply(request, self.state.backlog.set_aside.reply())

    async def overview(self, request: Request) -> Response:
        return reply_with(self.state.overview(_now()))

    async def healthz(self, request: Request) -> Response:
        if self.failure:
            return reply_with({"status": "failing", "reason": self.failure}, status=503)
        return reply_with({"status": "ok"})

    # -- helpers

    async def refuse(self, request: Request, error: Exception) -> Response:
        """Return the reply to a request that is not served."""
        if isinstance(error, HTTPException):
            return JSONResponse({"detail": error.detail}, status_code=error.status_code, headers=error.headers)
        if isinstance(error, StoreFailed):
            return JSONResponse({"detail": str(error)}, status_code=503, headers={"Retry-After": str(RECOVERY_S)})
        assert isinstance(error, Refusal)
        if error.plain:
            return PlainTextResponse(str(error.detail), status_code=error.status, headers=error.headers)
        return JSONResponse({"detail": error.detail}, status_code=error.status, headers=error.headers)

    async def _record(self, kind: type[Record], request: Request) -> Record:
        """Parse the short record that a request carries."""
        body = await read_body(request, limit=min(self.max_body, RECORD_BYTES))
        return parse_record(kind, body.content)

    def _apply(self, action: Callable[[], tuple[Answer, Change | None]]) -> Answer:
        """Change the state and make the change durable; if that fails, undo it."""
        if self.failure and _now() < self.failing_until:
            raise StoreFailed(self.failure)
        answer, change = action()
        if change is not None and self.journal is not None:
            try:
                self.journal.commit(change)
            except StoreFailed as error:
                self.failure, self.failing_until = str(error), _now() + RECOVERY_S
                self.state.restore(self.journal.snapshot(), _now())
                raise
            self.failure = ""
        return answer


class Handover:
    """Reply with a batch; sending it removes it from the state, unless the client is gone by then."""

    def __init__(self, response: Response, put_back: Callable[[], None]) -> None:
        self._response = response
        self._put_back = put_back

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_look(message: Message) -> None:
            if message["type"] != "http.response.body":
                await send(message)
                return
            await send({**message, "more_body": True})
            # Sending an empty part waits until the client has read beyond the socket's buffer, or has left.
            await send({"type": "http.response.body", "body": b"", "more_body": True})
            if await Request(scope, receive).is_disconnected():
                self._put_back()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self._response(scope, receive, send_and_look)


def _joined(batch: RolloutBatch) -> bytes:
    return b",".join([held.group.json for held in batch.groups])


def _in_all(read: Sequence[StoredGroup | WrongGroup], answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the reply to a list: how many groups were taken, the last buffer's size, and the fate of the others."""
    summary: dict[str, Any] = {"status": "received", "groups_processed": len(answers)}
    buffered = [answer for answer in answers if answer["status"] == "buffered"]
    if buffered:
        summary |= {"buffered": len(buffered), "last_buffer_size": buffered[-1]["buffer_size"]}
    set_aside = sum("reason" in answer for answer in answers)
    if set_aside:
        summary["set_aside"] = set_aside
    if refused := len(read) - len(answers):
        summary["refused"] = refused
    of_taken = iter(answers)
    reasons = [
        {"index": index, "reason": reason}
        for index, group in enumerate(read)
        if (reason := group.reason if isinstance(group, WrongGroup) else next(of_taken).get("reason"))
    ]
    return summary | ({"reasons": reasons} if reasons else {})


def _number(text: str, header: str) -> int:
    if not text.strip().isdecimal() or len(text) > _DIGITS:
        raise Refusal(422, f"{header}: {text[:40]!r} is not an id")
    return int(text)


def _now() -> float:
    return time.monotonic()
