"""``lachesis grpo``: training with the Atropos trainer's flags, its log lines and its errors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from urllib.parse import urlsplit

import httpx
from rich.console import Console

from lachesis.config.dialects.atropos import TRAINER
from lachesis.config.dialects.table import Entry
from lachesis.config.load import LoadedConfig, load_argv
from lachesis.config.schema import HttpEngineConfig, LachesisConfig
from lachesis.engines.control import server_url
from lachesis.errors import ConfigError, EngineError
from lachesis.metrics.base import run_paths
from lachesis.metrics.jsonl import read_metrics
from lachesis.run import RunSummary, train

Say = Callable[[str], None]

HELP_FLAGS = ("--help", "-h")
# What the documents print while training; said by the bridges, the engine's client and the source.
_LINES = ("[", "Exported ", "Attached ")
_HEALTH_S = 5.0

_GROUPS: Mapping[str, Sequence[str]] = {
    "Model": ("model", "dtype", "device"),
    "Weights to vLLM": (
        "weight-bridge-mode", "single-copy", "vllm", "gpu-memory-utilization", "max-model-len", "nccl", "trainer-rank",
        "world-size", "init-method", "num-inference-nodes",
    ),
    "Atropos API": ("atropos-url", "batch-size", "gradient-accumulation-steps", "seq-len"),
    "Training": (
        "training-steps", "learning-rate", "lr", "warmup-steps", "optimizer", "adafactor", "kl-coef", "clip-eps",
        "train-layer-indices",
    ),
    "LoRA": ("lora",),
    "Output": ("save-path", "checkpoint-interval", "use-wandb", "wandb", "log-dir", "debug-loading", "benchmark"),
}  # fmt: skip
_OWN = """\
Here
  --resume                       go on from the last checkpoint in --save-path
  --overwrite                    replace a run that is there already
  --set KEY=VALUE                a key of Lachesis's own, as in --set evaluation.every_steps=10
  --help                         this"""


@dataclass(frozen=True, slots=True)
class Invocation:
    """The words of a command line: those of the other trainer's dialect, and our own."""

    flags: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    values: Mapping[str, str] | None = None
    resume: bool = False
    overwrite: bool = False
    benchmark: bool = False
    help: bool = False

    def value(self, name: str) -> str | None:
        """Of one of our own flags that take one."""
        return (self.values or {}).get(name)


def split_words(words: Sequence[str], *, valued: Sequence[str] = ()) -> Invocation:
    """Take our own flags out of a command line.

    Args:
        valued: further flags of ours that take a value, without dashes.

    Raises:
        ConfigError: one of them has none.
    """
    flags: list[str] = []
    overrides: list[str] = []
    values: dict[str, str] = {}
    switches: set[str] = set()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if word in HELP_FLAGS or word in ("--resume", "--overwrite", "--benchmark"):
            switches.add("help" if word in HELP_FLAGS else name)
        elif word.startswith("--") and name in ("set", *valued):
            if not equals and not rest:
                raise ConfigError(f"--{name}: it needs a value", remedy="give one")
            value = value if equals else rest.pop(0)
            values[name] = value
            overrides += [value] if name == "set" else []
        else:
            flags.append(word)
    return Invocation(
        flags=tuple(flags),
        overrides=tuple(overrides),
        values=values,
        resume="resume" in switches,
        overwrite="overwrite" in switches,
        benchmark="benchmark" in switches,
        help="help" in switches,
    )


def grpo(
    words: Sequence[str],
    *,
    say: Say,
    console: Console | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> RunSummary | None:
    """Train as the flags say. None where help was asked for.

    Args:
        words: the command line after ``lachesis grpo``.
        say: prints a line.
        console, stop_requested: as :func:`lachesis.run.train`.

    Raises:
        LachesisError: as :func:`lachesis.run.train`.
    """
    asked = split_words(words)
    if asked.help:
        say(help_text())
        return None
    loaded = load_argv(asked.flags, overrides=asked.overrides)
    require_server(loaded.config)
    with documented_lines(say):
        summary = train(
            loaded, resume=asked.resume, overwrite=asked.overwrite, console=console, stop_requested=stop_requested
        )
    if asked.benchmark:
        say(benchmark(summary.run_dir, mode=loaded.config.bridge.kind))
    return summary


def require_server(config: LachesisConfig) -> None:
    """Raise EngineError unless the inference servers answer that are to run already."""
    if not isinstance(config.engine, HttpEngineConfig):
        return
    for url in map(server_url, config.engine.urls):
        try:
            httpx.get(f"{url}/health", timeout=_HEALTH_S, trust_env=False).raise_for_status()
        except httpx.HTTPError as error:
            lora = " --enable-lora" if config.bridge.kind.startswith("lora") else ""
            port = urlsplit(url).port or 80
            raise EngineError(
                f"External vLLM server required on port {port}: {url}/health does not answer ({error})",
                remedy=f"start it with `lachesis serve --model {config.model.path} --port {port}{lora}`",
            ) from error


@contextmanager
def documented_lines(say: Say) -> Iterator[None]:
    """Within it the lines that the other trainer prints are said: ``[LORA] ✓ Hot-swapped adapter`` and so on."""
    handler, logger = _Lines(say), logging.getLogger("lachesis")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


class _Lines(logging.Handler):
    def __init__(self, say: Say) -> None:
        super().__init__(logging.INFO)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.levelno == logging.INFO and message.startswith(_LINES):
            self._say(message)


def benchmark(run_dir: Path, *, mode: str) -> str:
    """The lists that ``--benchmark`` prints at the end: times of steps, transfers and waits, and memory."""
    steps = [line.values for line in read_metrics(run_paths(run_dir)["metrics"]).steps]
    lines = [f"benchmark: {mode}, {len(steps)} steps"]
    for title, name, unit in (
        ("step_times", "step_time", "s"),
        ("sync_times", "sync_time", "s"),
        ("data_fetch_times", "data_fetch_time", "s"),
        ("gpu_memories", "gpu_memory_gb", "GB"),
    ):
        values = [step[name] for step in steps if name in step]
        if not values:
            lines.append(f"  {title}: none")
            continue
        total = f", total {sum(values):.2f} {unit}" if unit == "s" else ""
        lines.append(f"  {title}: mean {fmean(values):.3f} {unit}, max {max(values):.3f} {unit}{total}")
        lines.append(f"    [{', '.join(f'{value:.3f}' for value in values)}]")
    return "\n".join(lines)


def help_text() -> str:
    """Every flag of the Atropos trainer with the key that it sets, in groups, and our own."""
    left = dict(TRAINER.entries)
    parts = ["Usage: lachesis grpo --model-name MODEL [FLAGS]", ""]
    parts += ["Trains with the Atropos trainer's flags; dashes and underscores are the same.", ""]
    for group, prefixes in _GROUPS.items():
        names = [name for name in left if any(name == p or name.startswith(f"{p}-") for p in prefixes)]
        parts += _group(group, [left.pop(name) for name in names])
    parts += _group("Other", list(left.values()))
    return "\n".join([*parts, _OWN])


def _group(title: str, entries: Sequence[Entry]) -> list[str]:
    if not entries:
        return []
    return [title, *(f"  --{entry.name:<28} {_meaning(entry)}" for entry in entries), ""]


def _meaning(entry: Entry) -> str:
    return "; ".join(part for part in (entry.path, entry.note) if part)


def loaded_flags(asked: Invocation, *, overrides: Sequence[str] = ()) -> LoadedConfig:
    """The configuration of a command line in the trainer's flags, ours applied last."""
    return load_argv(asked.flags, overrides=[*overrides, *asked.overrides])
