"""Runs of two ranks with vLLM on GPUs: what they train, and what is asked of each of them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.contracts.servers import python_path
from tests.contracts.vllm_server import entry_point
from tests.e2e.runs import metrics, state, torchrun, write_run
from tests.ports import free_port

# Of which vLLM's start is most, where processors are slow.
TRAINING_S = 600.0

SMALL: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
# As Qwen2.5-1.5B, but for its vocabulary.
LARGE: dict[str, Any] = {
    "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2,
    "num_hidden_layers": 28,
}  # fmt: skip
# The cache is said in bytes: memory is not measured, so that tests may run side by side.
SMALL_ENGINE: dict[str, Any] = {
    "gpu_memory_utilization": 0.1, "enforce_eager": True, "extra_args": ["--kv-cache-memory-bytes", "2000000000"],
}  # fmt: skip


def write(
    directory: Path,
    *,
    engine: dict[str, Any],
    bridge: dict[str, Any],
    sizes: dict[str, Any],
    **sections: dict[str, Any],
) -> Path:
    """A configuration over a new model of these sizes, its engine's and its bridge's sections changed."""
    sized = SMALL_ENGINE if sizes is SMALL else {"gpu_memory_utilization": 0.3}
    lora = {"adapter": {"kind": "lora", "r": 8}} if bridge["kind"] == "lora_nccl" else {}
    config = write_run(
        directory,
        engine={"kind": "vllm", "port": free_port(), "max_model_len": 64} | sized | engine,
        bridge=bridge,
        model={"device": "cuda", "dtype": "bfloat16", "compile": "off"},
        **lora,
        **sections,
    )
    before = Qwen2Config.from_pretrained(directory / "model").to_dict()
    del before["layer_types"]  # of so many layers as there were
    before["max_position_embeddings"] = 64  # as long as the engine takes
    Qwen2ForCausalLM(Qwen2Config(**before | sizes)).save_pretrained(directory / "model")
    return config


def train(config: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """The metrics of each step of a run by two ranks."""
    directory = config.parent
    monkeypatch.setenv("PYTHONPATH", python_path(entry_point(directory / "plugin")))
    monkeypatch.setenv("LACHESIS_SESSION_DIR", str(directory / "sessions"))
    run_dir = directory / "runs" / "proof"
    try:
        done = torchrun(2, "lachesis", "train", config, forked=False, timeout_s=TRAINING_S)
    except subprocess.TimeoutExpired as error:
        where = [*run_dir.glob("metrics.jsonl"), *run_dir.glob("logs/trainer.log")]
        said = "\n".join(path.read_text()[-2000:] for path in where)
        raise AssertionError(f"{error}\n{said}\n{engine_log(directory)}") from error
    assert done.code == 0, f"{done.err}\n{engine_log(directory)}"
    assert state(run_dir)["status"] == "finished"
    steps = [dict(line.values) for line in metrics(run_dir).steps]
    # An adapter that is split over the workers of one engine is proved by its canary alone.
    whole = "lora_nccl" not in config.read_text() or "tensor_parallel_size: 2" not in config.read_text()
    for log in run_dir.glob("logs/engine*.log") if whole else ():
        answered = log.read_text().count('"POST /bridge/prove HTTP/1.1" 200')
        assert answered > len(steps), f"{log.name}: digests were asked for at the start and after each step"
    return steps


def engine_log(directory: Path) -> str:
    return "\n".join(path.read_text()[-4000:] for path in directory.rglob("engine*.log"))
