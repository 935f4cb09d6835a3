"""A real vLLM server on a tiny model, on the CPU, for the suites that run over servers."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

import lachesis
from tests import warm
from tests.contracts.servers import MAX_LEN, MAX_RANK, TOKEN, ServerFactory, process, python_path
from tests.paths import ROOT
from tests.ports import free_port
from tests.tiny import tiny_model

# vLLM's attention on the CPU knows no heads smaller than 32.
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 96, "initializer_range": 0.15}
# On a machine that has other work.
START_S = 240.0
# Servers run beside one another, and bound to cores all would be bound to the first.
SMALL = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
# As on a GPU the engine's process does the work of its only worker; else vLLM's CPU build starts and imports one more.
ENVIRONMENT = SMALL | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


def build_model(seed: int = 0) -> PreTrainedModel:
    """A Qwen2 that vLLM can serve on the CPU."""
    return tiny_model("qwen2", seed=seed, **SIZES)


@contextmanager
def start_vllm(
    model: Path,
    root: Path,
    session_dir: Path,
    log: Path,
    *arguments: str,
    lora: bool = True,
    plugin: str = "",
    **variables: str,
) -> Iterator[str]:
    """vLLM's server, at the address it yields, until the block ends.

    Args:
        model: directory of model and tokenizer.
        root: from where adapters and checkpoints may be loaded.
        session_dir: where the server writes its session.
        log: for its output.
        arguments: more flags of ``vllm serve``.
        lora: with room for an adapter.
        plugin: a function ``module:name`` that vLLM calls in each of its processes.
        variables: more of its environment.
    """
    port = free_port()
    command = [
        sys.executable, "-m", "lachesis.plugins.serving.vllm_launch", str(model), "--port", str(port),
        "--served-model-name", "tiny", "--max-model-len", str(MAX_LEN), "--dtype", "float32", "--enforce-eager",
        *(("--enable-lora", "--max-lora-rank", str(MAX_RANK)) if lora else ()), "--adapter-root", str(root), *arguments,
    ]  # fmt: skip
    environment = {
        **ENVIRONMENT,
        "LACHESIS_SESSION_DIR": str(session_dir),
        "LACHESIS_SESSION_TOKEN": TOKEN,
        "PYTHONPATH": python_path(entry_point(log.parent, plugin=plugin), ROOT),
        **variables,
    }
    with process(
        command, url=f"http://127.0.0.1:{port}", log=log, start_s=START_S, popen=warm.VllmPopen, **environment
    ) as url:
        yield url


def entry_point(directory: Path, *, plugin: str = "") -> Path:
    """A directory below which vLLM finds our plugin, also where the package runs from its sources, and another one."""
    metadata = directory / "installed" / f"lachesis-{lachesis.__version__}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: lachesis\nVersion: {lachesis.__version__}\n")
    (metadata / "entry_points.txt").write_text(
        "[vllm.endpoint_plugins]\nlachesis = lachesis.engines.vllm.plugin:LachesisPlugin\n"
        + (f"[vllm.general_plugins]\nof_the_test = {plugin}\n" if plugin else "")
    )
    return metadata.parent


VLLM_SERVER = ServerFactory(name="vllm", start=start_vllm, build_model=build_model, tolerance=1e-3, exports=False)
