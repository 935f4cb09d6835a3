"""What vLLM's server comes to import, which takes ten seconds of a processor: for processes that are forked.

So are the processes that such a server starts, which vLLM on a CPU would have import all of it anew. On a GPU it forks
them itself where it is not told otherwise.
"""

from __future__ import annotations

import gc
from multiprocessing.context import ForkContext, ForkProcess

import vllm.entrypoints.cli.serve
import vllm.entrypoints.generate.api_router
import vllm.entrypoints.openai.api_server
import vllm.v1.engine.async_llm
import vllm.v1.engine.core
import vllm.v1.engine.utils
import vllm.v1.executor.multiproc_executor
import vllm.v1.worker.cpu_worker

import lachesis.plugins.serving.vllm_launch
from lachesis.plugins.serving.vllm_launch import leave_to_server
from tests import imports

__all__ = ["imports", "lachesis", "vllm"]


class _Process(ForkProcess):
    def run(self) -> None:
        leave_to_server()
        super().run()


class _Context(ForkContext):
    Process = _Process  # type: ignore[assignment]


for module in (vllm.v1.engine.utils, vllm.v1.executor.multiproc_executor):
    module.get_mp_context = _Context  # type: ignore[attr-defined]

gc.freeze()
