"""The endpoint plugin by which vLLM's server gets our routes; ``lachesis`` among the ``vllm.endpoint_plugins``."""

from __future__ import annotations

import atexit
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

from lachesis.engines.serving.routes import engine_routes
from lachesis.engines.serving.session import new_session, remove_session, write_session
from lachesis.transport.bridge_file import default_directory

ROOTS_VARIABLE = "LACHESIS_ADAPTER_ROOTS"
SHARED_VARIABLE = "VLLM_ENABLE_SHARED_WEIGHTS"


class LachesisPlugin:
    """vLLM makes one for each server, has it see the application, and later the engine."""

    name = "lachesis"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._app: Any = None

    def attach_router(self, app: Any) -> None:
        """Remember the application: the routes need the engine, which comes with :meth:`init_state`."""
        self._app = app

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Prepare the engine, write the session, add the routes.

        Raises:
            LachesisError: the engine cannot be served as it was started. vLLM then ends.
        """
        from lachesis.engines.vllm.served import ServedVllm

        roots = adapter_roots(os.environ.get(ROOTS_VARIABLE))
        session = new_session(host=args.host or "0.0.0.0", port=args.port, adapter_roots=roots)
        served = ServedVllm(
            engine_client, model=args.model, served_names=args.served_model_name or [args.model], session=session
        )
        await served.start()
        if served.lora_request is not None:
            # By this name vLLM's own routes find the adapter.
            state.openai_serving_models.lora_requests[served.lora_request.lora_name] = served.lora_request
        if os.environ.get(SHARED_VARIABLE, "0") not in ("", "0"):
            directory = default_directory()
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            await served.export_shared(directory)
        write_session(session)
        atexit.register(remove_session, session)
        state.lachesis = served
        self._app.router.routes.extend(engine_routes(served, session=session, adapter_roots=roots))


def adapter_roots(variable: str | None) -> tuple[Path, ...]:
    """Directories in the variable, separated as in PATH; the current one without it."""
    named = [Path(part) for part in (variable or "").split(os.pathsep) if part]
    return tuple(path.resolve() for path in named) or (Path.cwd().resolve(),)
