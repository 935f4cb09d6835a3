"""``lachesis grpo``: training with the Atropos trainer's flags, its log lines and its errors."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from urllib.parse import urlsplit

import httpx
from rich.console import Console

from lachesis.common.errors import ConfigError, EngineError
from lachesis.common.http import server_url
from lachesis.common.run_files import run_paths
from lachesis.common.types import Say
from lachesis.common.world import World
from lachesis.config.dialects.atropos_help import help_text
from lachesis.config.load import LoadedConfig, load_argv
from lachesis.config.schema import HttpEngineConfig, LachesisConfig, LoraAdapterConfig
from lachesis.metrics.sinks.jsonl import read_metrics
from lachesis.run.train import Companions, RunSummary, train

HELP_FLAGS = ("--help", "-h")
# What the documents print while training; said by the bridges, the engine's client and the source.
_LINES = ("[", "Exported ", "Attached ")
_HEALTH_S = 5.0


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
    world: World | None = None,
) -> RunSummary | None:
    """Train as the flags say. None where help was asked for.

    Args:
        words: the command line after ``lachesis grpo``.
        say: prints a line.
        console, stop_requested, world: as :func:`lachesis.run.train.train`.

    Raises:
        LachesisError: as :func:`lachesis.run.train.train`.
    """
    asked = split_words(words)
    if asked.help:
        say(help_text())
        return None
    loaded = load_argv(asked.flags, overrides=asked.overrides)
    require_server(loaded.config)
    return train_as_asked(loaded, asked, say=say, console=console, stop_requested=stop_requested, world=world)


def train_as_asked(
    loaded: LoadedConfig,
    asked: Invocation,
    *,
    say: Say,
    console: Console | None,
    stop_requested: Callable[[], bool],
    companions: Companions | None = None,
    world: World | None = None,
) -> RunSummary:
    """Train, say the documented lines meanwhile, and the benchmark's at the end if they are asked for.

    Raises:
        LachesisError: as :func:`lachesis.run.train.train`, whose arguments these are.
    """
    with documented_lines(say):
        summary = train(
            loaded,
            resume=asked.resume,
            overwrite=asked.overwrite,
            console=console,
            stop_requested=stop_requested,
            companions=companions,
            world=world,
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
            port = urlsplit(url).port or 80
            raise EngineError(
                f"External vLLM server required on port {port}: {url}/health does not answer ({error})",
                remedy=f"start it with `{_serve_command(config, port=port)}`",
            ) from error


def _serve_command(config: LachesisConfig, *, port: int) -> str:
    """What starts a server that this trainer can use."""
    words = ["lachesis", "serve", "--model", config.model.path, "--port", str(port)]
    if config.model.dtype != "auto":
        words += ["--dtype", config.model.dtype]
    if isinstance(config.adapter, LoraAdapterConfig) and config.bridge.kind.startswith("lora"):
        words += ["--enable-lora", "--max-lora-rank", str(config.adapter.r)]
    return shlex.join(words)


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
