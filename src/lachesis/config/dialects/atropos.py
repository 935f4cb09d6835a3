"""The Atropos trainer's flags as a canonical document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from lachesis.common.errors import ConfigError
from lachesis.config.dialects.atropos_names import (
    ADAPTER_FLAGS,
    ENGINE_FLAGS,
    LISTS,
    SPELLINGS,
    SWITCHES,
    TEXTS,
    TRAINER,
)
from lachesis.config.dialects.convert import run_directory
from lachesis.config.dialects.table import Translation
from lachesis.config.document import Document, parse_document

ManagedEngine = Literal["vllm", "embedded_server"]

_MODES = ("none", "shared_vllm", "lora_only", "lora_restart", "lora_nccl", "broadcast", "reload")
# Those that stop the server and start it again have to be the ones who started it.
_RESTARTING = ("none", "lora_restart")
_OVER_CHANNELS = ("lora_nccl", "broadcast")


def translate_argv(argv: Sequence[str], *, engine: ManagedEngine | None = None) -> Translation:
    """Flags of the trainer as a canonical document, with its documented defaults.

    ``--flag value`` and ``--flag=value`` are the same, dashes and underscores too; ``--lr`` is
    ``--learning-rate``. What is wrong is in ``document.problems`` of the result.

    Args:
        argv: the flags.
        engine: what the run starts; by default vLLM in the modes that restart it, and a server that runs already in
            all others.
    """
    translation = Translation(_read(argv), TRAINER)
    translation.run()
    if not translation.has("model-name"):
        translation.problem("model-name", "missing, but required: the model to train")
    mode = _mode(translation)
    if mode is not None:
        translation.put("bridge.kind", mode, "weight-bridge-mode")
        _put_engine(translation, engine or ("vllm" if mode in _RESTARTING else None))
        _put_transfer(translation, mode)
        if mode.startswith("lora_"):
            translation.put("adapter.kind", "lora", "weight-bridge-mode")
            for name, default in ADAPTER_FLAGS.items():
                translation.put_entry(name, default)
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
        name = SPELLINGS.get(flag, flag)
        words = [text] if equals else []
        while arguments and (not words or name in LISTS) and _is_value(arguments[0], name):
            words.append(arguments.pop(0))
        if not words and name not in SWITCHES:
            document.problems.append(f"--{flag}: it needs a value")
            continue
        if name in document.data:
            document.problems.append(f"--{flag}: given twice; keep one")
        document.data[name] = _scalar(" ".join(words), name) if words else True
        document.origins[(name,)] = f"--{flag}"
    return document


def _is_value(argument: str, name: str) -> bool:
    """Whether a word belongs to the flag before it; to a switch only true and false do."""
    return not argument.startswith("--") and (name not in SWITCHES or argument.lower() in ("true", "false"))


def _scalar(text: str, name: str) -> Any:
    if name in TEXTS:
        return text
    return parse_document(f"value: {text}" if text else "value: ''", name=f"--{name}").data["value"]


def _mode(translation: Translation) -> str | None:
    """How weights reach the engine; None, and a problem, where the flags contradict each other."""
    mode = translation.value("weight-bridge-mode", "none")
    mode = "none" if mode == "legacy" else mode
    if translation.value("single-copy"):
        if mode not in ("none", "shared_vllm"):
            translation.problem("single-copy", f"single copy is shared_vllm, and --weight-bridge-mode is {mode}")
        mode = "shared_vllm"
    if mode not in _MODES:
        translation.problem("weight-bridge-mode", f"expected one of {', '.join(_MODES)}, got {mode!r}")
        return None
    return mode


def _put_engine(translation: Translation, engine: ManagedEngine | None) -> None:
    """A server that the run starts, with its options, or one that runs already and has its own."""
    port = translation.value("vllm-port", 9001)
    given = [name for name in ENGINE_FLAGS if translation.has(name)]
    if engine is None:
        translation.put("engine.kind", "http", "weight-bridge-mode")
        translation.put("engine.urls", [f"http://127.0.0.1:{port}"], "vllm-port")
        if given:
            translation.note(", ".join(given), "for the server, which runs already; give them to `lachesis serve`")
        return
    translation.put("engine.kind", engine, "weight-bridge-mode")
    translation.put("engine.port", port, "vllm-port")
    for name in given:
        if engine == "vllm" or name == "max-model-len":
            translation.put_entry(name)
        else:
            translation.note(name, "does nothing: it is vLLM's, and the embedded engine is started")


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
    each_step = translation.value("nccl-sync-every-step", True) and not translation.value("no-nccl-sync-every-step")
    if mode != "lora_nccl" or not each_step:
        translation.put("bridge.every_steps", translation.value(interval, 3), interval)
    if mode in _OVER_CHANNELS:
        _put_rendezvous(translation)


def _put_rendezvous(translation: Translation) -> None:
    """Where trainer and engine meet. ``env://`` has the trainer's processes meet, which torchrun sees to."""
    for name in ("init-method", "nccl-init-method"):
        address = translation.value(name)
        if address is not None and address != "env://":
            translation.put("bridge.init_method", address, name)


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
        for name in ("wandb-group", "wandb-run-name"):
            translation.put_entry(name)
