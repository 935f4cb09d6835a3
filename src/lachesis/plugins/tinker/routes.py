"""The protocol's paths: JSON, protobuf where it has that, and futures that are polled for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

import zstandard
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tinker import types
from tinker.types.future_retrieve_request import FutureRetrieveRequest

from lachesis.common.errors import DataError, LachesisError
from lachesis.common.http import BodyTooLong, read_body
from lachesis.common.json_values import read_object
from lachesis.plugins.tinker import wire
from lachesis.plugins.tinker.checkpoints import Saved
from lachesis.plugins.tinker.clients import Clients
from lachesis.plugins.tinker.page import page
from lachesis.plugins.tinker.service import Run, Service, Unknown
from lachesis.plugins.tinker.worker import Answer, Failure

Endpoint = Callable[[Request], Awaitable[Response]]
B = TypeVar("B", bound=BaseModel)

# Clients give a poll 45 s.
_POLL_S = 20.0
_PREFIX = "/api/v1"
# Data to train on is sent in numbers of four bytes, everything else as JSON.
_MAX_DATA = 256 << 20
_MAX_JSON = 8 << 20
_MAX_WINDOW = 32 << 20
_PART = 1 << 20
# Fields of bodies that name things that belong to a client.
_NAMES = ("session_id", "model_id", "sampling_session_id", "model_path")


class Routes:
    """Endpoints of the service.

    Args:
        service: the state behind them.
        api_key: the key that clients have to send; ``None`` accepts any.
    """

    def __init__(self, service: Service, *, clients: Clients) -> None:
        self._service = service
        self._clients = clients

    def table(self) -> list[Route]:
        """Return all routes; other paths are refused by name."""
        service = self._service
        posts: dict[str, Endpoint] = {
            "create_model": partial(self._future, types.CreateModelRequest, service.create_run),
            "load_weights": partial(self._future, types.LoadWeightsRequest, service.load_run),
            "optim_step": partial(self._future, types.OptimStepRequest, service.step),
            "save_weights": partial(self._future, types.SaveWeightsRequest, service.save),
            "save_weights_for_sampler": partial(
                self._future, types.SaveWeightsForSamplerRequest, service.save_for_sampler
            ),
            "unload_model": partial(self._future, types.UnloadModelRequest, service.unload),
            "asample": self._sample,
            "forward_backward": self._pass,
            "retrieve_future": self._retrieve,
            "get_info": self._info,
            # Its own HTTP client needs the system's certificates, even for addresses without TLS.
            "client/config": _always(types.ClientConfigResponse(use_pyqwest_transport=False)),
            "client/dynamic_config": _always(types.ClientDynamicConfigResponse()),
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session}/finish": self._finish,
            "create_sampling_session": self._create_sampler,
            "join_sampling_session": self._join_sampler,
            "weights_info": self._weights_info,
            "telemetry": self._telemetry,
        }
        gets: dict[str, Endpoint] = {
            "healthz": _always(types.HealthResponse(status="ok")),
            "get_server_capabilities": self._capabilities,
            "samplers/{sampler}": self._sampler,
            "training_runs": self._training_runs,
            "training_runs/{run}": self._training_run,
            "training_runs/{run}/checkpoints": self._checkpoints,
        }
        deletes: dict[str, Endpoint] = {"training_runs/{run}/checkpoints/{kind}/{name}": self._delete}
        return [
            Route(f"{_PREFIX}/{path}", self._guarded(endpoint), methods=[method])
            for method, paths in (("POST", posts), ("GET", gets), ("DELETE", deletes))
            for path, endpoint in paths.items()
        ] + [
            Route("/", self._page, methods=["GET"]),
            Route("/{path:path}", self._unserved, methods=["GET", "POST", "PUT", "DELETE"]),
        ]

    def _guarded(self, endpoint: Endpoint) -> Endpoint:
        """Wrap an endpoint: check the key, and answer errors with what to do."""

        async def guarded(request: Request) -> Response:
            client = self._clients.of(request.headers.get("x-api-key", ""))
            if client is None:
                return _refusal(401, "this server has no client with this key", "set TINKER_API_KEY to a client's key")
            request.state.client = client
            try:
                self._check_own(request, *map(str, request.path_params.values()))
                return await endpoint(request)
            except Unknown as error:
                return _refusal(404, error.message, error.remedy)
            except BodyTooLong as error:
                return _refusal(413, error.message, error.remedy)
            except LachesisError as error:
                return _refusal(422, error.message, error.remedy)

        return guarded

    def _check_own(self, request: Request, *names: str) -> None:
        """Raise Unknown if a session, run, sampler or checkpoint of these names is another client's."""
        for name in names:
            if not self._service.owns(request.state.client, name):
                raise Unknown(f"there is no {name}, or it has ended", remedy="use one that was made with the same key")

    async def _read(self, request: Request, body: type[B]) -> B:
        """Return a request's body, after checking that all names in it are the client's own.

        Raises:
            DataError: the body is invalid. Unknown: it names something that belongs to another client.
        """
        found = await _read(request, body)
        names = [getattr(found, field, None) for field in _NAMES]
        if isinstance(found, types.LoadWeightsRequest):
            names.append(found.path)
        self._check_own(request, *filter(None, names))
        return found

    # --- requests whose answer is fetched later ---------------------------------------------------------------

    async def _future(self, body: type[BaseModel], start: Callable[[Any], str], request: Request) -> Response:
        return JSONResponse({"request_id": self._started(start, await self._read(request, body))})

    async def _pass(self, request: Request) -> Response:
        message = wire.pass_message(await _body(request, limit=_MAX_DATA))
        self._check_own(request, message.model_id)
        return JSONResponse({"request_id": self._started(self._service.pass_through, message)})

    async def _sample(self, request: Request) -> Response:
        body = await self._read(request, types.SampleRequest)
        request_id = self._started(partial(self._service.sample, client=request.state.client), body)
        names = [f"{request_id}:{number}" for number in range(min(body.num_samples, wire.MOST_SAMPLES))]
        return JSONResponse({"request_id": request_id, "sample_sequence_ids": names})

    def _started(self, start: Callable[[Any], str], body: object) -> str:
        """Start a request and return its id; an invalid one gets an id that fails, as later errors do."""
        try:
            return start(body)
        except Unknown:
            raise
        except LachesisError as error:
            return self._service.failed(error)

    async def _retrieve(self, request: Request) -> Response:
        request_id = (await _read(request, FutureRetrieveRequest)).request_id
        future = self._service.futures.find(request_id)
        if future is None:
            raise Unknown(f"there is no request {request_id}, or it has ended", remedy="send it again")
        found = await _result(future)
        if found is None:
            return JSONResponse({"queue_state": "active"}, status_code=408)
        self._service.futures.fetched(request_id)
        if isinstance(found, Failure):
            return JSONResponse({"error": found.message, "category": found.category})
        return Response(found.content, media_type=found.media_type)

    # --- sessions and the server's abilities ----------------------------------------------------------------------

    async def _create_session(self, request: Request) -> Response:
        await _read(request, types.CreateSessionRequest)
        session_id = self._service.create_session(request.state.client)
        return _model(types.CreateSessionResponse(session_id=session_id))

    async def _heartbeat(self, request: Request) -> Response:
        try:
            self._service.hear((await self._read(request, types.SessionHeartbeatRequest)).session_id)
        except Unknown as error:
            return _refusal(410, error.message, error.remedy)  # by which clients stop
        return _model(types.SessionHeartbeatResponse())

    async def _finish(self, request: Request) -> Response:
        self._service.finish_session(request.path_params["session"])
        return JSONResponse({})

    async def _telemetry(self, request: Request) -> Response:
        await _body(request)  # clients' telemetry to their maker is not kept
        return _model(types.TelemetryResponse(status="accepted"))

    async def _capabilities(self, request: Request) -> Response:
        service = self._service
        model = types.SupportedModel(
            model_name=service.name, max_context_length=service.max_context, trainable=True, sampleable=True
        )
        return _model(types.GetServerCapabilitiesResponse(supported_models=[model]))

    async def _info(self, request: Request) -> Response:
        return _model(self._service.info((await self._read(request, types.GetInfoRequest)).model_id))

    # --- samplers ---------------------------------------------------------------------------------------------

    async def _create_sampler(self, request: Request) -> Response:
        body = await self._read(request, types.CreateSamplingSessionRequest)
        return _model(types.CreateSamplingSessionResponse(sampling_session_id=self._service.create_sampler(body)))

    async def _join_sampler(self, request: Request) -> Response:
        body = await self._read(request, types.JoinSamplingSessionRequest)
        sampler = self._service.sampler(body.sampling_session_id)
        sampler.clients += 1
        return _model(types.JoinSamplingSessionResponse(client_counter=sampler.clients))

    async def _sampler(self, request: Request) -> Response:
        sampler_id = request.path_params["sampler"]
        path = self._service.sampler(sampler_id).path
        return _model(types.GetSamplerResponse(sampler_id=sampler_id, base_model=self._service.name, model_path=path))

    # --- runs and their checkpoints -----------------------------------------------------------------------------

    async def _weights_info(self, request: Request) -> Response:
        path = str((await _object(request)).get("tinker_path"))
        self._check_own(request, path)
        saved = self._service.store.find(path)
        shape = saved.shape
        return _model(
            types.WeightsInfoResponse(
                base_model=saved.base_model,
                is_lora=True,
                lora_rank=shape.rank,
                train_unembed=shape.train_unembed,
                train_mlp=shape.train_mlp,
                train_attn=shape.train_attn,
            )
        )

    async def _training_runs(self, request: Request) -> Response:
        runs = self._service.runs_of(request.state.client)
        found = [self._described(run_id, run) for run_id, run in runs.items() if run.training]
        first, limit = _count(request, "offset", 0), _count(request, "limit", 20)
        cursor = types.Cursor(offset=first, limit=limit, total_count=len(found))
        return _model(types.TrainingRunsResponse(training_runs=found[first : first + limit], cursor=cursor))

    async def _training_run(self, request: Request) -> Response:
        run_id = request.path_params["run"]
        run = self._service.runs.get(run_id)
        if run is None or run.training is None:
            raise Unknown(f"there is no run {run_id}, or it has ended", remedy="continue from one of its checkpoints")
        return _model(self._described(run_id, run))

    def _described(self, run_id: str, run: Run) -> types.TrainingRun:
        saved = [_checkpoint(one) for one in self._service.store.of_run(run_id)]
        by_type = {one.checkpoint_type: one for one in saved}
        return types.TrainingRun(
            training_run_id=run_id,
            base_model=self._service.name,
            model_owner="local",
            is_lora=True,
            lora_rank=run.made.shape.rank,
            last_request_time=datetime.fromtimestamp(run.last_request, UTC),
            last_checkpoint=by_type.get("training"),
            last_sampler_checkpoint=by_type.get("sampler"),
            user_metadata=dict(run.user_metadata) if run.user_metadata else None,
        )

    async def _checkpoints(self, request: Request) -> Response:
        found = [
            saved
            for saved in self._service.store.of_run(request.path_params["run"])
            if saved.owner == request.state.client.name
        ]
        return _model(types.CheckpointsListResponse(checkpoints=[_checkpoint(saved) for saved in found]))

    async def _delete(self, request: Request) -> Response:
        parts = request.path_params
        path = f"tinker://{parts['run']}/{parts['kind']}/{parts['name']}"
        self._check_own(request, path)
        self._service.store.delete(path)
        return JSONResponse({})

    async def _page(self, request: Request) -> Response:
        return page(self._service)

    async def _unserved(self, request: Request) -> Response:
        remedy = "docs/tinker.md lists what is served"
        return _refusal(404, f"{request.method} {request.url.path} is not served here", remedy)


def _count(request: Request, name: str, default: int) -> int:
    """Return a number of the query. Raises DataError if it is not one."""
    given = request.query_params.get(name, str(default))
    if not (given.isascii() and given.isdigit() and len(given) < 10):
        raise DataError(f"{name}={given!r} is not a number of at least 0", remedy="give one")
    return int(given)


async def _result(future: Future[Answer | Failure]) -> Answer | Failure | None:
    """Wait for the result of a request; None if it is still open after a while."""
    try:
        return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), _POLL_S)
    except TimeoutError:
        return None


async def _body(request: Request, *, limit: int = _MAX_JSON) -> bytes:
    """Return the body of a request, unpacked. Raises DataError if it is too long, or not in its header's format."""
    body = await read_body(request, limit=limit)
    if request.headers.get("content-encoding") == "zstd":
        return await asyncio.to_thread(_unpacked, body, limit=limit)
    return body


def _unpacked(body: bytes, *, limit: int) -> bytes:
    """Unpack a frame of zstd, and stop at the limit.

    A frame states its own length, and ``decompress`` allocates that much, whatever the limit.
    """
    content = bytearray()
    try:
        with zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).stream_reader(body) as reader:
            while part := reader.read(_PART):
                content += part
                if len(content) > limit:
                    raise BodyTooLong(
                        f"the body is longer than {limit >> 20} MiB, unpacked",
                        remedy="send the data in several requests",
                    )
    except zstandard.ZstdError as error:
        raise DataError(f"the body is not in zstd's format: {error}", remedy="send it uncompressed") from error
    return bytes(content)


async def _read(request: Request, body: type[B]) -> B:
    """Parse the body of a request. Raises DataError if it is invalid."""
    found = await _object(request)
    try:
        return await asyncio.to_thread(body.model_validate, found)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise DataError(
            f"{where} of {body.__name__} is wrong: {first['msg']}", remedy="use the client tinker 0.38"
        ) from error


async def _object(request: Request) -> dict[str, Any]:
    body = await _body(request)
    try:
        return await asyncio.to_thread(read_object, body)  # a long one must not hold up other clients
    except ValueError as error:
        raise DataError(f"the body is not a JSON object: {error}", remedy="use the client tinker 0.38") from error


def _model(model: BaseModel) -> Response:
    return Response(model.model_dump_json(), media_type="application/json")


def _always(model: BaseModel) -> Endpoint:
    """Return an endpoint that gives every request the same answer."""

    async def answer(request: Request) -> Response:
        return _model(model)

    return answer


def _checkpoint(saved: Saved) -> types.Checkpoint:
    return types.Checkpoint(
        checkpoint_id=saved.checkpoint_id,
        checkpoint_type="training" if saved.has_optimizer else "sampler",
        time=datetime.fromtimestamp(saved.time, UTC),
        tinker_path=saved.path,
        size_bytes=saved.size_bytes,
        user_metadata=dict(saved.user_metadata) if saved.user_metadata else None,
        expires_at=None if saved.expires_at is None else datetime.fromtimestamp(saved.expires_at, UTC),
    )


def _refusal(status: int, message: str, remedy: str) -> JSONResponse:
    """Return a refusal in the same form as Lachesis's other servers."""
    detail = f"{message} -> {remedy}" if remedy else message
    return JSONResponse({"detail": detail, "error": {"message": message, "remedy": remedy}}, status_code=status)
