"""The flags of the Atropos trainer and of its vLLM server, those of its code besides those of its documents.

Read from atroposlib 0.4.0 and from earlier states of its trainer, which had the KL term and the NCCL modes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lachesis.common.errors import ConfigError
from lachesis.config.dialects.convert import DTYPES, OPTIMIZERS, devices, layer_numbers, module_names, one_of
from lachesis.config.dialects.table import UNSET, Dialect, Entry, cannot, nothing, refused, together

SPELLINGS = {
    "lr": "learning-rate",
    "model": "model-name",
    "vllm-gpu-memory-utilization": "gpu-memory-utilization",
}
"""Flags with two names, and the one under which their value is found."""

SWITCHES = frozenset(
    {
        *("single-copy", "use-wandb", "benchmark", "debug-loading", "nccl-sync-every-step", "no-nccl-sync-every-step"),
        *("adafactor-scale-parameter", "adafactor-relative-step", "no-reference-logprobs"),
    }
)
"""Flags that are true where no value follows."""

LISTS = frozenset({"lora-target-modules"})
"""Flags that take every word up to the next flag."""

TEXTS = frozenset({"model-name", "save-path", "log-dir", "wandb-project", "wandb-run-name", "wandb-group"})
"""Names and paths: text even where they look like numbers."""

ENGINE_FLAGS = ("gpu-memory-utilization", "max-model-len", "vllm-gpu")
"""Flags for a server that the run starts."""

ADAPTER_FLAGS = {
    "lora-r": 16,
    "lora-alpha": 32,
    "lora-dropout": 0.05,
    "lora-target-modules": UNSET,
    "lora-layer-indices": UNSET,
}
"""Flags of the adapter with the trainer's defaults, where they are ours too."""


def _device(value: Any) -> Any:
    """``cuda:0`` is the first one visible, which is where the trainer goes."""
    if isinstance(value, str) and value.startswith("cuda:") and value != "cuda:0":
        raise ConfigError(f"{value}: choose the GPU by CUDA_VISIBLE_DEVICES={value[5:]}, and leave --device out")
    return "cuda" if value == "cuda:0" else value


def _checkpoint_interval(value: Any) -> Any:
    return UNSET if value == 0 else value


def _trainer() -> Iterator[Entry]:
    for name in ("model-name", "model"):
        yield Entry(name, "model.path")
    yield Entry(
        "dtype",
        "model.dtype",
        convert=one_of(DTYPES),
        note="an engine that the run starts has it too; bfloat16 there",
    )
    yield Entry("device", "model.device", convert=_device)
    yield from _engine()
    yield Entry("atropos-url", "source.url", note="port 8000 in its code")
    yield Entry("training-steps", "run.steps", default=10)
    yield together("batch-size", "batch.micro_batch_size", "with the accumulation steps: source.batch_size")
    yield together("gradient-accumulation-steps", "source.batch_size", "batch-size x these; 32 in its code")
    yield Entry("seq-len", "source.max_sequence_length", default=2048)
    yield from _optimization()
    yield from _adapter()
    yield together("save-path", "run.name", "the run directory: run.dir and run.name")
    yield Entry("checkpoint-interval", "checkpoint.every_steps", convert=_checkpoint_interval, note="3 in its code")
    yield together("use-wandb", "logging.wandb.project")
    yield together("wandb-project", "logging.wandb.project")
    yield together("wandb-group", "logging.wandb.group")
    yield together("wandb-run-name", "logging.wandb.name")
    yield from _without_key()


def _engine() -> Iterator[Entry]:
    yield together("weight-bridge-mode", "bridge.kind", "none restarts the engine on a checkpoint")
    yield together("single-copy", "bridge.kind", "true is shared_vllm")
    yield together("vllm-config-path", "bridge.config_path", "auto searches for it")
    yield together("vllm-port", "engine.urls", "engine.port where the run starts the engine itself")
    for name in ("gpu-memory-utilization", "vllm-gpu-memory-utilization"):
        yield together(name, "engine.gpu_memory_utilization", "where the run starts the engine itself")
    yield together("max-model-len", "engine.max_model_len", "where the run starts the engine itself; 4096 there")
    yield Entry(
        "vllm-gpu", "engine.devices", "together", convert=devices, note="where the run starts the engine itself"
    )
    yield together("vllm-restart-interval", "bridge.every_steps", "3 there")
    yield together("nccl-init-method", "bridge.init_method", "a free local port if unset")
    yield together("init-method", "bridge.init_method", "as --nccl-init-method if it is tcp://; env:// is torchrun's")
    yield together("nccl-sync-every-step", "bridge.every_steps", "true is 1")
    yield together("no-nccl-sync-every-step", "bridge.every_steps", "takes --vllm-restart-interval in its place")


def _optimization() -> Iterator[Entry]:
    for name in ("learning-rate", "lr"):
        yield Entry(name, "optimizer.learning_rate", note="if unset 1e-6, or 1e-5 with LoRA; 1e-5 in its code")
    yield Entry("warmup-steps", "optimizer.warmup_steps")
    yield Entry("optimizer", "optimizer.kind", convert=one_of(OPTIMIZERS), note="adamw_8bit in its code")
    yield Entry("adafactor-scale-parameter", "optimizer.scale_parameter")
    yield from refused(
        "Adafactor takes no relative steps beside a learning rate, there neither; write --learning-rate 0.01, which is "
        "what they are for the first 10,000 steps",
        "adafactor-relative-step",
    )
    yield Entry("kl-coef", "algorithm.beta", default=0.1, note="to the policy that sampled, as there; see kl_reference")
    yield Entry("clip-eps", "algorithm.epsilon", default=0.2)
    yield from cannot(
        "ratios are always to the policy that sampled; --kl-coef 0 leaves the KL term out", "no-reference-logprobs"
    )
    yield Entry("train-layer-indices", "model.train_layers", convert=layer_numbers, note="as 20-31 or 0-3,28-31")


def _adapter() -> Iterator[Entry]:
    yield together("lora-r", "adapter.r")
    yield together("lora-alpha", "adapter.alpha")
    yield together("lora-dropout", "adapter.dropout", "0.05 there")
    yield Entry(
        "lora-target-modules",
        "adapter.targets",
        "together",
        convert=module_names,
        note="q_proj and v_proj if unset there",
    )
    yield Entry("lora-layer-indices", "adapter.layers", "together", convert=layer_numbers, note="as 20-31 or 0-3,28-31")


def _without_key() -> Iterator[Entry]:
    yield from nothing("Lachesis counts the engine's processes itself", "nccl-world-size")
    yield from nothing("the launcher sets them: torchrun's RANK and WORLD_SIZE", "trainer-rank", "world-size")
    yield from nothing("inference servers are counted by their addresses (engine.urls)", "num-inference-nodes")
    yield from nothing("all logs are in logs/ of the run directory", "log-dir")
    yield from nothing("errors in loading name the tensors; --traceback shows where they came from", "debug-loading")
    yield from nothing("the times of each part of a step are always measured", "benchmark")


def _server() -> Iterator[Entry]:
    yield Entry("model", "model.path")
    yield Entry("port", "engine.port")
    yield Entry("tensor-parallel-size", "engine.tensor_parallel_size")
    yield Entry("dtype", "engine.dtype", convert=one_of(DTYPES))
    yield Entry("gpu-memory-utilization", "engine.gpu_memory_utilization")
    yield Entry("max-model-len", "engine.max_model_len")
    yield Entry("enable-lora", "adapter.kind", convert=lambda value: "lora" if value else "none")
    yield Entry("enforce-eager", "engine.enforce_eager", note="needed by no bridge: captured graphs see new weights")


TRAINER = Dialect("the Atropos trainer", list(_trainer()), prefix="--")
SERVER = Dialect("the Atropos vLLM server", list(_server()), prefix="--")
