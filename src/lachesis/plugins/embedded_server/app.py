"""The embedded engine as a server process: the HTTP contract of the vLLM server, on any machine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lachesis.common.deadline import Deadline
from lachesis.common.errors import ConfigError, ModelError, first_line
from lachesis.common.hosts import OwnHostOnly
from lachesis.common.http import bind, http_server
from lachesis.common.types import GenerationRequest, SamplingParams
from lachesis.config.schema import ModelConfig
from lachesis.engines.embedded.engine import EmbeddedEngine
from lachesis.engines.options import ServeOptions
from lachesis.engines.serving.backend import ModelInfo
from lachesis.engines.serving.server import engine_routes
from lachesis.engines.serving.session import Session, new_session, remove_session, write_session
from lachesis.plugins.embedded_server.backend import EmbeddedBackend
from lachesis.plugins.embedded_server.loading import end_token_ids, load_causal_lm, load_tokenizer
from lachesis.plugins.embedded_server.openai import OpenAIRoutes
from lachesis.plugins.embedded_server.weights import EmbeddedWeights
from lachesis.train.model.loading import context_length
from lachesis.transport.bridge_file import asked_at_start

logger = logging.getLogger(__name__)

_MAX_NUM_SEQS, _MAX_LORA_RANK = 64, 64


def serve_embedded(options: ServeOptions, *, on_ready: Callable[[str], None] | None = None) -> None:
    """Load the model and serve it until SIGINT or SIGTERM; the signal is raised again at the end.

    Args:
        options: what to serve, and where.
        on_ready: called with the address, such as ``http://127.0.0.1:9001``, once the model is loaded.

    Raises:
        ConfigError: an option cannot be used, or the port is taken.
        ModelError: the model or its tokenizer cannot be loaded.
        EngineError: the session file cannot be written.
    """
    _check(options)
    listener = bind(options.host, options.port)  # connections are accepted once the model is loaded
    session: Session | None = None
    served: EmbeddedBackend | None = None
    try:
        session = new_session(host=options.host, port=listener.getsockname()[1], adapter_roots=options.adapter_roots)
        served = build_served(options, session=session)
        if (path := asked_at_start()) is not None:
            asyncio.run(served.export_shared(path))
        write_session(session)
        if on_ready is not None:
            on_ready(session.url)
        app = build_app(served, session=session, allowed_hosts=(options.host, *options.allowed_hosts))
        http_server(app).run(sockets=[listener])
    finally:
        listener.close()
        if served is not None:
            served.close()
        if session is not None:
            remove_session(session)


def build_served(options: ServeOptions, *, session: Session) -> EmbeddedBackend:
    """Load the model, and an engine around it.

    Raises:
        ConfigError: ``max_model_len`` is more than the model has positions for.
        ModelError: it cannot be loaded, or cannot generate a token.
    """
    tokenizer = load_tokenizer(options.tokenizer or options.model)
    model = load_causal_lm(
        options.model, dtype=options.dtype or "auto", device=options.device or "auto", revision=options.revision
    )
    limit = context_length(ModelConfig(path=options.model, revision=options.revision))
    max_model_len = limit if options.max_model_len is None else options.max_model_len
    if max_model_len > limit:
        raise ConfigError(
            f"--max-model-len {max_model_len} is more than the model's {limit} positions", remedy="lower it"
        )
    ends = end_token_ids(model, tokenizer)
    pad = tokenizer.pad_token_id
    max_num_seqs = options.max_num_seqs or _MAX_NUM_SEQS
    engine = EmbeddedEngine(
        model,
        eos_token_ids=ends,
        pad_token_id=pad if isinstance(pad, int) else 0,
        max_batch_size=max_num_seqs,
        max_context=max_model_len,
        decode=lambda ids: str(tokenizer.decode(list(ids))),
        session_id=session.session_id,
    )
    _run_first_token(engine, options.model)
    max_rank = (options.max_lora_rank or _MAX_LORA_RANK) if options.enable_lora else 0
    weights = EmbeddedWeights(engine, model, path=options.model, max_lora_rank=max_rank)
    info = ModelInfo(
        model=options.model,
        served_names=(options.served_model_name or options.model,),
        dtype=weights.dtype,
        vocab_size=model.config.get_text_config(decoder=True).vocab_size,
        max_model_len=max_model_len,
        tensor_parallel_size=1,
        device=weights.device,
        lora_enabled=options.enable_lora,
        max_lora_rank=max_rank,
    )
    return EmbeddedBackend(
        engine=engine, weights=weights, tokenizer=tokenizer, info=info, session=session, max_num_seqs=max_num_seqs
    )


def _run_first_token(engine: EmbeddedEngine, model: str) -> None:
    """Raise ModelError if the model is loaded but cannot compute."""
    one = GenerationRequest((1,), SamplingParams(max_tokens=1))
    try:
        engine.generate([one], deadline=Deadline("the first token of the server", None))
    except Exception as error:
        raise ModelError(
            f"{model} is loaded, but cannot generate a token: {type(error).__name__}: {first_line(error)}",
            remedy="check that transformers can generate with it, and try another --dtype or --device",
        ) from error


def build_app(served: EmbeddedBackend, *, session: Session, allowed_hosts: Sequence[str] = ()) -> Starlette:
    """Build the application over a served engine; when it ends, it closes the engine and the session.

    Args:
        served: the engine.
        session: of the server.
        allowed_hosts: host names accepted in requests, besides addresses and this machine's own names.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            # Closed here, because uvicorn raises the signal again after this, which ends the process.
            remove_session(session)
            served.close()

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        document = {"error": {"type": "EngineError", "message": message, "remedy": "check the path and the method"}}
        return JSONResponse(document, status_code=error.status_code, headers=error.headers)

    return Starlette(
        routes=[
            *engine_routes(served, session=session, adapter_roots=session.adapter_roots),
            *OpenAIRoutes(served).routes(),
        ],
        lifespan=lifespan,
        middleware=[Middleware(OwnHostOnly, allowed=allowed_hosts)],
        exception_handlers={HTTPException: refuse},
    )


def _check(options: ServeOptions) -> None:
    positive = {
        "--max-model-len": options.max_model_len,
        "--max-num-seqs": options.max_num_seqs,
        "--max-lora-rank": options.max_lora_rank,
    }
    for name, value in positive.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}", remedy="give a number of at least 1")
    if options.dtype not in (None, "auto", "float32", "float16", "bfloat16", "float64"):
        raise ConfigError(f"--dtype {options.dtype} is not known", remedy="use auto, bfloat16, float16 or float32")
    for root in options.adapter_roots:
        # A missing directory may still appear: a run makes its own once everything else has been checked.
        if root.exists() and not root.is_dir():
            raise ConfigError(f"--adapter-root {root} is not a directory", remedy="name one")
