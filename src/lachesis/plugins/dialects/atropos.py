"""The flags of the Atropos trainer and of its vLLM server, and the trainer's as a canonical document.

Read from atroposlib 0.4.0 and from earlier states of its trainer, which had the KL term and the NCCL modes; it has the
flags of its code as well as those of its documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from lachesis.config.document import Document, parse_document
from lachesis.config.schema.engines import BaseBridgeConfig, BridgeConfig, ChannelBridgeConfig, InProcessBridgeConfig
from lachesis.plugins.dialects.grpo import put_output_dir
from lachesis.plugins.dialects.table import UNSET, Dialect, Translation, read_names
from lachesis.plugins.dialects.words import Words


class _Words(Words):
    spellings: dict[str, str]
    switches: frozenset[str]
    lists: frozenset[str]
    texts: frozenset[str]
    engine: list[str]
    adapter_names: list[str]
    adapter: dict[str, int | float]


FLAGS = _Words.read("atropos")


TRAINER = Dialect("the Atropos trainer", list(read_names("atropos", "trainer")), prefix="--")
SERVER = Dialect("the Atropos vLLM server", list(read_names("atropos", "server")), prefix="--")

ManagedEngine = Literal["vllm", "embedded_server"]

# Every bridge is a mode, except that of an engine in the trainer's own process.
_MODES: Mapping[str, type[BaseBridgeConfig]] = {
    bridge.model_fields["kind"].default: bridge
    for bridge in get_args(get_args(BridgeConfig)[0])
    if bridge is not InProcessBridgeConfig
}


def translate_argv(argv: Sequence[str], *, engine: ManagedEngine | None = None) -> Translation:
    """Translate flags of the trainer to a canonical document, with its documented defaults.

    ``--flag value`` and ``--flag=value`` are the same, as are dashes and underscores; ``--lr`` is
    ``--learning-rate``. Errors are in ``document.problems`` of the result.

    Args:
        argv: the flags.
        engine: engine that the run starts; by default vLLM in the modes that restart it, and a running server in
            all others.
    """
    translation = Translation(_read(argv), TRAINER)
    translation.run()
    if not translation.has("model-name"):
        translation.problem("model-name", "missing, but required: the model to train")
        translation.put("model.path", "-", "model-name")  # reported once
    mode = _mode(translation)
    if mode is not None:
        translation.put("bridge.kind", mode, "weight-bridge-mode")
        # Only the process that started the server can restart it; with lora_restart that is the run.
        started = _MODES[mode].capabilities.owns_engine or translation.value("weight-bridge-mode") == "lora_restart"
        _put_engine(translation, engine or ("vllm" if started else None))
        _put_transfer(translation, mode)
        if _MODES[mode].capabilities.adapter_only:
            translation.put("adapter.kind", "lora", "weight-bridge-mode")
            for name in FLAGS.adapter_names:
                translation.put_entry(name, FLAGS.adapter.get(name, UNSET))
    translation.put("source.kind", "atropos", "atropos-url")
    rows, accumulation = translation.whole("batch-size", 2), translation.whole("gradient-accumulation-steps", 1)
    if rows is not None and accumulation is not None:
        translation.put("batch.micro_batch_size", rows, "batch-size")
        translation.put("source.batch_size", rows * accumulation, "gradient-accumulation-steps")
    _put_places(translation)
    translation.finish()
    return translation


def _read(argv: Sequence[str]) -> Document:
    """Read flags as data: values are parsed as YAML, a flag without value is true."""
    document = Document(name="the command line", data={})
    arguments = list(argv)
    while arguments:
        argument = arguments.pop(0)
        if not argument.startswith("--") or argument == "--":
            document.problems.append(f"{argument!r} is neither a flag nor a flag's value")
            continue
        flag, equals, text = argument[2:].partition("=")
        flag = flag.replace("_", "-")
        name = FLAGS.spellings.get(flag, flag)
        words = [text] if equals else []
        while arguments and (not words or name in FLAGS.lists) and _is_value(arguments[0], name):
            words.append(arguments.pop(0))
        if not words and name not in FLAGS.switches:
            document.problems.append(f"--{flag}: it needs a value")
            continue
        if name in document.data:
            document.problems.append(f"--{flag}: given twice; keep one")
        document.data[name] = _scalar(" ".join(words), name) if words else True
        document.origins[(name,)] = f"--{flag}"
    return document


def _is_value(argument: str, name: str) -> bool:
    """Return True if a word belongs to the flag before it; a switch takes only true and false."""
    return not argument.startswith("--") and (name not in FLAGS.switches or argument.lower() in ("true", "false"))


def _scalar(text: str, name: str) -> Any:
    if name in FLAGS.texts:
        return text
    return parse_document(f"value: {text}" if text else "value: ''", name=f"--{name}").data["value"]


def _mode(translation: Translation) -> str | None:
    """Return how weights reach the engine; None, and a problem, if the flags contradict each other."""
    mode = translation.value("weight-bridge-mode", "none")
    mode = "none" if mode == "legacy" else mode
    if mode == "lora_restart":
        translation.warning(
            "weight-bridge-mode",
            "lora_restart is lora_only here: the engine takes each adapter while it runs, with CUDA graphs and proof",
        )
        mode = "lora_only"
    if translation.value("single-copy"):
        if mode not in ("none", "shared_vllm"):
            translation.problem("single-copy", f"single copy is shared_vllm, and --weight-bridge-mode is {mode}")
        mode = "shared_vllm"
    if not isinstance(mode, str) or mode not in _MODES:
        translation.problem("weight-bridge-mode", f"expected one of {', '.join(_MODES)}, got {mode!r}")
        return None
    return mode


def _put_engine(translation: Translation, engine: ManagedEngine | None) -> None:
    """Set the engine: a server that the run starts, with its options, or a running server, which has its own."""
    port = translation.value("vllm-port", 9001)
    given = [name for name in FLAGS.engine if translation.has(name)]
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
            translation.note(name, "has no effect: it is for vLLM, but the run starts the embedded engine")


def leave_out_engine_flags(translation: Translation) -> None:
    """Drop vLLM's options that flags have set if ``--set`` has chosen another engine, with a note."""
    engine = translation.document.data.get("engine", {})
    if engine.get("kind") in ("vllm", None):
        return
    for entry in (TRAINER.entries[flag] for flag in FLAGS.engine):
        section, _, key = entry.path.partition(".")
        if translation.document.origins.get((section, key), "").startswith("--") and translation.has(entry.name):
            if engine.get("kind") == "embedded_server" and key == "max_model_len":
                continue
            engine.pop(key, None)
            translation.note(entry.name, f"has no effect: it is for vLLM, but engine.kind is {engine['kind']}")


def _put_transfer(translation: Translation, mode: str) -> None:
    """Set when and how weights are sent."""
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
    if issubclass(_MODES[mode], ChannelBridgeConfig):
        _put_rendezvous(translation)


def _put_rendezvous(translation: Translation) -> None:
    """Set the address where trainer and engine meet, except ``env://``, where torchrun's processes meet."""
    for name in ("init-method", "nccl-init-method"):
        address = translation.value(name)
        if address is not None and address != "env://":
            translation.put("bridge.init_method", address, name)


def _put_places(translation: Translation) -> None:
    put_output_dir(translation, "save-path", "trained_model_checkpoints")
    if translation.value("use-wandb") or translation.has("wandb-project"):
        translation.put("logging.wandb.project", translation.value("wandb-project", "grpo"), "wandb-project")
        for name in ("wandb-group", "wandb-run-name"):
            translation.put_entry(name)
