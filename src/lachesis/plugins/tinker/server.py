"""The composition root of the Tinker server: options in, a server until a signal."""

from __future__ import annotations

import logging
import os
import random
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.middleware import Middleware

from lachesis.bridges.canary import CanaryText
from lachesis.bridges.proof import TOLERANCE
from lachesis.common.errors import ConfigError, DependencyError
from lachesis.common.hosts import OwnHostOnly
from lachesis.common.http import http_server, listen, url_of
from lachesis.config.schema import ModelConfig, NoAdapterConfig
from lachesis.engines.embedded.engine import EmbeddedEngine
from lachesis.plugins.tinker.clients import Clients
from lachesis.plugins.tinker.options import TinkerOptions
from lachesis.train.model.forward import plan_forward
from lachesis.train.model.loading import context_length, eos_token_ids, load_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lachesis.plugins.tinker.engines import Engines
    from lachesis.plugins.tinker.sampling import Sampler
    from lachesis.plugins.tinker.training import Base

logger = logging.getLogger("lachesis")
API_KEY = "TINKER_API_KEY"


def serve(options: TinkerOptions, *, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        on_ready: called with the address, once it listens.

    Raises:
        ConfigError: an option cannot be used, or the port is taken.
        DependencyError: the client's package, which defines the messages, is not installed.
        ModelError: the model cannot be loaded.
    """
    listener = listen(options.host, options.port)
    try:
        clients = Clients.single(os.environ.get(API_KEY)) if options.clients is None else Clients.read(options.clients)
        app = build_app(options, clients=clients)
        on_ready(url_of(listener))
        http_server(app).run(sockets=[listener])
    finally:
        listener.close()


def build_app(options: TinkerOptions, *, clients: Clients) -> Starlette:
    """Build the application and load its model. Raises as :func:`serve`.

    Args:
        options: of the server.
        api_key: that clients have to send; ``None`` accepts any.
    """
    try:
        from lachesis.plugins.tinker.routes import Routes
        from lachesis.plugins.tinker.state import restore_state, save_state
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("tinker", "zstandard"):
            raise
        raise DependencyError(
            "lachesis tinker-server needs the client's package tinker, whose messages it reads and writes",
            remedy="install it: pip install 'lachesis[tinker]'",
        ) from error
    service, state = _service(options), options.dir / ".server"
    if restored := restore_state(service, state):
        logger.info("%d training runs of the server before it continue", restored)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            service.close()
            save_state(service, state)

    return Starlette(
        routes=Routes(service, clients=clients).table(),
        lifespan=lifespan,
        middleware=[Middleware(OwnHostOnly, allowed=(options.host, *options.allowed_hosts))],
    )


def _service(options: TinkerOptions) -> Any:
    from lachesis.plugins.tinker.checkpoints import CheckpointStore
    from lachesis.plugins.tinker.service import Service

    base, sampler, engines = load(options)
    place = Path(options.model)
    return Service(
        base,
        sampler,
        CheckpointStore(options.dir),
        name=options.name or options.model,
        tokenizer=str(place.resolve()) if place.is_dir() else options.model,
        session_s=options.session_timeout,
        seed=random.getrandbits(62) if options.seed is None else options.seed,
        max_rank=options.max_lora_rank,
        unembed=options.unembed == "asked",
        engines=engines,
    )


def load(options: TinkerOptions) -> tuple[Base, Sampler, Engines | None]:
    """Load the model that all runs share, and connect to the engines that sample. Raises as :func:`serve`."""
    from lachesis.plugins.tinker.adapters import AdapterBank
    from lachesis.plugins.tinker.sampling import Sampler
    from lachesis.plugins.tinker.training import Base

    config = ModelConfig(path=options.model, device=options.device, dtype=options.dtype)
    limit = context_length(config)
    longest = limit if options.max_model_len is None else options.max_model_len
    if longest > limit:
        raise ConfigError(f"--max-model-len {longest} is more than the model's {limit} positions", remedy="lower it")
    loaded = load_model(config, NoAdapterConfig())
    model, tokenizer = loaded.transformer.eval(), loaded.tokenizer
    bank = AdapterBank(model, name=options.name or options.model)
    pad = tokenizer.pad_token_id
    engine = EmbeddedEngine(
        model,
        eos_token_ids=eos_token_ids(loaded),
        pad_token_id=pad if isinstance(pad, int) else 0,
        max_batch_size=options.max_num_seqs,
        max_context=longest,
        decode=lambda ids: str(tokenizer.decode(list(ids))),
    )
    base = Base(
        bank=bank,
        plan=plan_forward(model, packing="auto"),
        device=model.device,
        vocab_size=model.config.get_text_config().vocab_size,
        max_context=longest,
        max_tokens=options.max_tokens_per_microbatch,
    )
    sampler = Sampler(engine, bank)
    engines = _engines(options, sampler, model, longest=longest) if options.engine else None
    return base, sampler, engines


def _engines(options: TinkerOptions, sampler: Sampler, model: PreTrainedModel, *, longest: int) -> Engines:
    """Connect to the servers of ``--engine``, and prove that they have the base model."""
    from lachesis.plugins.tinker.engines import Canary, Engines

    text = CanaryText((), vocab_size=model.config.get_text_config().vocab_size, longest=longest)
    token_ids = text.written_by(sampler.greedy)
    dtype = str(model.dtype).removeprefix("torch.")
    arithmetic = "tf32" if dtype == "float32" and model.device.type == "cuda" else dtype
    canary = Canary(token_ids=token_ids, base=sampler.logprobs(None, token_ids), limit=TOLERANCE[arithmetic])
    return Engines(options.engine, canary=canary, directory=options.dir.resolve() / ".engines" / uuid.uuid4().hex)
