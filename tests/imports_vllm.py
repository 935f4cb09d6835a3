"""What vLLM's server comes to import, which takes ten seconds of a processor: for processes that are forked."""

from __future__ import annotations

import gc

import vllm.entrypoints.cli.serve
import vllm.entrypoints.generate.api_router
import vllm.entrypoints.openai.api_server
import vllm.v1.engine.async_llm
import vllm.v1.worker.cpu_worker

import lachesis.engines.vllm.launch
from tests import imports

__all__ = ["imports", "lachesis", "vllm"]

gc.freeze()
