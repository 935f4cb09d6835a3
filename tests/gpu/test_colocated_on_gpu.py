"""Two ranks and vLLM on the same two GPUs: what learns, what is proved, and how long the engine's sleep takes.

PYTHONPATH=src:. python -m pytest tests/gpu/test_colocated_on_gpu.py -s
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.contracts.servers import python_path
from tests.contracts.vllm_server import entry_point
from tests.e2e.runs import metrics, state, torchrun, write_run
from tests.e2e.test_engines import rise
from tests.e2e.test_learning import sharpen
from tests.ports import free_port

# Of which vLLM's start is most, where processors are slow.
TRAINING_S = 600.0
pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(900),
]

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
ENGINES: dict[str, dict[str, Any]] = {
    "one engine over both": {"tensor_parallel_size": 2},
    "a copy on each": {"data_parallel_size": 2},
}
CYCLE = ("sleep_time", "wake_time", "transfer_time", "proof_time", "train_time", "generation_time", "step_time")


def write(directory: Path, *, engine: str, bridge: str, sizes: dict[str, Any], **sections: dict[str, Any]) -> Path:
    lora = {"adapter": {"kind": "lora", "r": 8}} if bridge == "lora_nccl" else {}
    config = write_run(
        directory,
        engine={"kind": "vllm", "port": free_port(), "max_model_len": 64, "enable_sleep_mode": True}
        | ENGINES[engine]
        | (SMALL_ENGINE if sizes is SMALL else {"gpu_memory_utilization": 0.3}),
        bridge={"kind": bridge},
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


def check_cycle(steps: list[dict[str, float]], *, what: str) -> None:
    """Each step had its weights, proved, and the engine slept through its training. Prints the seconds."""
    for number, values in enumerate(steps, start=1):
        assert values["weight_version"] == number
        assert values["canary_error"] <= 0.25
        assert values["sleep_time"] > 0 and values["wake_time"] > 0
        assert {"train_time/0", "train_time/1"} <= values.keys()
    seconds = {name: median(values[name] for values in steps[1:]) for name in CYCLE}
    sys.stdout.write(f"\n{what}: {', '.join(f'{name} {value:.3f} s' for name, value in seconds.items())}\n")


@pytest.mark.parametrize(
    ("engine", "bridge"),
    [
        ("one engine over both", "broadcast"),
        ("a copy on each", "broadcast"),
        ("one engine over both", "lora_nccl"),
        ("a copy on each", "lora_nccl"),
    ],
)
def test_two_gpus_train_and_generate_in_turn(engine: str, bridge: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = write(tmp_path, engine=engine, bridge=bridge, sizes=SMALL)
    if bridge == "lora_nccl":
        sharpen(tmp_path)
    steps = train(config, monkeypatch)
    check_cycle(steps, what=f"{engine}, {bridge}")
    assert rise(tmp_path / "runs" / "proof") > 0.4


def test_the_cycle_of_a_larger_model_leaves_both_sides_their_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """1.3 billion parameters: what a step holds of a card does not grow from the second to the last."""
    config = write(tmp_path, engine="one engine over both", bridge="broadcast", sizes=LARGE, run={"steps": 8})
    steps = train(config, monkeypatch)
    check_cycle(steps, what="1.3 billion parameters")
    held = [name for name in steps[1] if name.startswith("gpu_memory_in_use_gb/")]
    assert held, "what each GPU holds was measured"
    for name in held:
        assert steps[-1][name] <= steps[1][name] * 1.05 + 0.2, name
