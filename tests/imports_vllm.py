"""What vLLM's server comes to import, which takes ten seconds of a processor: for processes that are forked.

So are the processes that such a server starts, which vLLM on a CPU would have import all of it anew. On a GPU it forks
them itself where it is not told otherwise.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import stat
from multiprocessing.context import ForkContext, ForkProcess

import vllm.entrypoints.cli.serve
import vllm.entrypoints.generate.api_router
import vllm.entrypoints.openai.api_server
import vllm.v1.engine.async_llm
import vllm.v1.engine.core
import vllm.v1.engine.utils
import vllm.v1.executor.multiproc_executor
import vllm.v1.worker.cpu_worker

import lachesis.engines.vllm.launch
from tests import imports

__all__ = ["imports", "lachesis", "vllm"]


class _Process(ForkProcess):
    """Without what a fork has of its parent, and a process of its own has not."""

    def run(self) -> None:
        signal.set_wakeup_fd(-1)  # of the parent's event loop, which would take signals to this process for its own
        for name in os.listdir("/proc/self/fd"):
            _close_if_listening(int(name))
        super().run()


class _Context(ForkContext):
    Process = _Process  # type: ignore[assignment]


def _close_if_listening(descriptor: int) -> None:
    """Who connects to the server once it is gone has to be refused."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return
        with socket.socket(fileno=os.dup(descriptor)) as one:
            listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError:  # it is gone: that of the directory itself, which has been read
        return
    if listens:
        os.close(descriptor)


for module in (vllm.v1.engine.utils, vllm.v1.executor.multiproc_executor):
    module.get_mp_context = _Context  # type: ignore[attr-defined]

gc.freeze()
