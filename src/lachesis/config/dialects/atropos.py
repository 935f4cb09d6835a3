"""The flags of the Atropos trainer and of its vLLM server, and the fields of its configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lachesis.config.dialects.convert import DTYPES, OPTIMIZERS, one_of, run_directory
from lachesis.config.dialects.table import UNSET, Dialect, Entry, Translation, nothing, together
from lachesis.config.document import Document, parse_document
from lachesis.errors import ConfigError

_SWITCHES = {"single-copy", "use-wandb", "benchmark", "nccl-sync-every-step"}
_MODES = ("none", "shared_vllm", "lora_only", "lora_restart", "lora_nccl", "broadcast", "reload")
# Those that stop the server and start it again have to be the ones who started it.
_RESTARTING = ("none", "lora_restart")
_SPELLINGS = {"lr": "learning-rate"}


def translate_argv(argv: Sequence[str]) -> Translation:
    """Flags of the trainer as a canonical document, with its documented defaults.

    ``--flag value`` and ``--flag=value`` are the same, dashes and underscores too; ``--lr`` is
    ``--learning-rate``. What is wrong is in ``document.problems`` of the result.
    """
    translation = Translation(_read(argv), TRAINER)
    translation.run()
    if not translation.has("model-name"):
        translation.problem("model-name", "missing, but required: the model to train")
    _put_bridge(translation)
    translation.put("source.kind", "atropos", "atropos-url")
    rows, accumulation = translation.whole("batch-size", 2), translation.whole("gradient-accumulation-steps", 1)
    if rows is not None and accumulation is not None:
        translation.put("batch.micro_batch_size", rows, "batch-size")
        translation.put("source.batch_size", rows * accumulation, "gradient-accumulation-steps")
    translation.put("algorithm.kl_reference", "sampler", "kl-coef")
    _put_places(translation)
    translation.finish()
    return translation


def _read(argv: Sequence[str]) -> Document:
    """Flags as data: values are read as YAML does, a flag without value is true."""
    document = Document(name="the command line", data={})
    arguments = list(argv)
    while arguments:
        argument = arguments.pop(0)
        if not argument.startswith("--") or argument == "--":
            document.problems.append(f"{argument!r} is no flag and belongs to none")
            continue
        flag, equals, text = argument[2:].partition("=")
        flag = flag.replace("_", "-")
        name = _SPELLINGS.get(flag, flag)
        if not equals and arguments and not _is_flag(arguments[0]) and not _bare(name, arguments[0]):
            text, equals = arguments.pop(0), "="
        if not equals and name not in _SWITCHES:
            document.problems.append(f"--{flag}: it needs a value")
            continue
        if name in document.data:
            document.problems.append(f"--{flag}: given twice; keep one")
        document.data[name] = _scalar(text, name) if equals else True
        document.origins[(name,)] = f"--{flag}"
    return document


def _is_flag(argument: str) -> bool:
    return argument.startswith("--")


def _bare(name: str, following: str) -> bool:
    """Whether a switch stands alone before an argument that is no true or false."""
    return name in _SWITCHES and following.lower() not in ("true", "false")


def _scalar(text: str, name: str) -> Any:
    value = parse_document(f"value: {text}" if text else "value: ''", name=f"--{name}").data["value"]
    # Names and paths are text even where they look like numbers.
    return text if name in ("model-name", "save-path", "wandb-project", "wandb-run-name") else value


def _put_bridge(translation: Translation) -> None:
    mode = translation.value("weight-bridge-mode", "none")
    mode = "none" if mode == "legacy" else mode
    if translation.value("single-copy"):
        if mode not in ("none", "shared_vllm"):
            translation.problem("single-copy", f"single copy is shared_vllm, and --weight-bridge-mode is {mode}")
        mode = "shared_vllm"
    if mode not in _MODES:
        translation.problem("weight-bridge-mode", f"expected one of {', '.join(_MODES)}, got {mode!r}")
        return
    translation.put("bridge.kind", mode, "weight-bridge-mode")
    port = translation.value("vllm-port", 9001)
    if mode in _RESTARTING:
        translation.put("engine.kind", "vllm", "weight-bridge-mode")
        translation.put("engine.port", port, "vllm-port")
        if translation.has("gpu-memory-utilization"):
            name = "gpu-memory-utilization"
            translation.put("engine.gpu_memory_utilization", translation.value(name), name)
    else:
        translation.put("engine.kind", "http", "weight-bridge-mode")
        translation.put("engine.urls", [f"http://127.0.0.1:{port}"], "vllm-port")
        if translation.has("gpu-memory-utilization"):
            translation.note("gpu-memory-utilization", "is the server's; the trainer takes what it needs")
    if mode.startswith("lora_"):
        for name, path, default in (
            ("lora-r", "adapter.r", 16),
            ("lora-alpha", "adapter.alpha", 32),
            ("lora-dropout", "adapter.dropout", 0.05),
        ):
            translation.put(path, translation.value(name, default), name)
        translation.put("adapter.kind", "lora", "weight-bridge-mode")
    _put_transfer(translation, mode)


def _put_transfer(translation: Translation, mode: str) -> None:
    """When and how weights travel."""
    interval = "vllm-restart-interval"
    if mode == "shared_vllm":
        path = translation.value("vllm-config-path", "auto")
        if path != "auto":
            translation.put("bridge.config_path", path, "vllm-config-path")
        if translation.has(interval):
            translation.note(interval, "does nothing: every step updates the engine's own tensors")
        return
    each_step = translation.value("nccl-sync-every-step", True)
    if mode != "lora_nccl" or not each_step:
        translation.put("bridge.every_steps", translation.value(interval, 3), interval)
    if mode in ("lora_nccl", "broadcast") and translation.has("nccl-init-method"):
        translation.put("bridge.init_method", translation.value("nccl-init-method"), "nccl-init-method")


def _put_places(translation: Translation) -> None:
    try:
        parent, name = run_directory(translation.value("save-path", "trained_model_checkpoints"))
    except ConfigError as error:
        translation.problem("save-path", error.message)
    else:
        translation.put("run.dir", parent, "save-path")
        translation.put("run.name", name, "save-path")
    if translation.value("use-wandb") or translation.has("wandb-project"):
        translation.put("logging.wandb.project", translation.value("wandb-project", "grpo"), "wandb-project")
        if translation.has("wandb-run-name"):
            translation.put("logging.wandb.name", translation.value("wandb-run-name"), "wandb-run-name")


def _device(value: Any) -> Any:
    """``cuda:0`` is the first one visible, which is where the trainer goes."""
    return "cuda" if value == "cuda:0" else value


def _checkpoint_interval(value: Any) -> Any:
    return UNSET if value == 0 else value


def _trainer() -> Iterator[Entry]:
    yield Entry("model-name", "model.path")
    yield together("weight-bridge-mode", "bridge.kind", "none restarts the engine on a checkpoint")
    yield together("single-copy", "bridge.kind", "true is shared_vllm")
    yield together("vllm-config-path", "bridge.config_path", "auto searches for it")
    yield together("vllm-port", "engine.urls", "engine.port where the run starts the engine itself")
    yield Entry("atropos-url", "source.url")
    yield Entry("training-steps", "run.steps", default=10)
    yield together("batch-size", "batch.micro_batch_size", "with the accumulation steps: source.batch_size")
    yield together("gradient-accumulation-steps", "source.batch_size", "batch-size x gradient-accumulation-steps")
    for name in ("learning-rate", "lr"):
        yield Entry(name, "optimizer.learning_rate", note="1e-6 if unset, 1e-5 with LoRA")
    yield Entry("seq-len", "source.max_sequence_length", default=2048)
    yield Entry("optimizer", "optimizer.kind", convert=one_of(OPTIMIZERS))
    yield Entry("kl-coef", "algorithm.beta", default=0.1, note="to the policy that sampled, as there; see kl_reference")
    yield Entry("clip-eps", "algorithm.epsilon", default=0.2)
    yield together("lora-r", "adapter.r")
    yield together("lora-alpha", "adapter.alpha")
    yield together("lora-dropout", "adapter.dropout", "0.05 there")
    yield together("gpu-memory-utilization", "engine.gpu_memory_utilization", "where the run starts the engine itself")
    yield together("vllm-restart-interval", "bridge.every_steps", "3 there")
    yield together("save-path", "run.name", "the run directory: run.dir and run.name")
    yield together("use-wandb", "logging.wandb.project")
    yield together("wandb-project", "logging.wandb.project")
    yield together("wandb-run-name", "logging.wandb.name")
    yield Entry("checkpoint-interval", "checkpoint.every_steps", convert=_checkpoint_interval)
    yield Entry("device", "model.device", convert=_device)
    yield together("nccl-init-method", "bridge.init_method", "a free local port if unset")
    yield together("nccl-sync-every-step", "bridge.every_steps", "true is 1")
    yield from nothing("Lachesis counts the engine's processes itself", "nccl-world-size")
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
