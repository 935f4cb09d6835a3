"""Imports of `lachesis serve` with vLLM, shared by several servers by ``lachesis.process.forkserver.ForkServer``."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence

from lachesis.common.imports import without
from lachesis.engines.vllm.launch import keep_torchao_away, needless

# Of the command, then of vLLM; its engine's own come with what it does.
_MODULES = (
    "lachesis.cli.serving",
    "lachesis.run.serve",
    "lachesis.engines.vllm.plugin",
    "lachesis.engines.vllm.backend",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
)
_CUDA_DRIVER = "libcuda.so.1"
_CUDA_NOT_INITIALIZED = 3


def load(arguments: Sequence[str]) -> None:
    """Import it. ``arguments``, a model and flags of ``vllm serve``, tell what servers do without."""
    keep_torchao_away(arguments)
    with without(*needless(arguments)):
        for module in _MODULES:
            importlib.import_module(module)


def is_usable() -> bool:
    """Return True if processes forked from this one can use the GPUs: none of the imports has initialized CUDA."""
    try:
        driver = ctypes.CDLL(_CUDA_DRIVER)
    except OSError:  # there is no GPU
        return True
    # It initializes nothing itself. In a forked process the answer would be the same either way.
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == _CUDA_NOT_INITIALIZED
