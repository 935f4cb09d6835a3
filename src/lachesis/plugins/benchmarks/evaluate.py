"""Evaluation of a model, or of a run's model, by an engine that is started for it or already runs."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lachesis.common.deadline import Deadline
from lachesis.common.errors import ConfigError
from lachesis.common.http import free_port
from lachesis.common.run_files import run_paths
from lachesis.common.types import SamplingParams
from lachesis.config.schema import ModelConfig
from lachesis.engines.http.client import HttpEngine
from lachesis.engines.options import ServeOptions
from lachesis.plugins.benchmarks.results import RESULTS, Score, read_results, write_results
from lachesis.plugins.benchmarks.section import BenchmarkConfig, needed_package
from lachesis.plugins.benchmarks.suite import Suite
from lachesis.plugins.benchmarks.table import benchmarks
from lachesis.plugins.export.export import export
from lachesis.process.managed import ManagedProcess
from lachesis.train.model.loading import context_length, load_tokenizer

_START_S = 1200.0


@dataclass(frozen=True, slots=True)
class Asked:
    """Benchmarks and settings of an evaluation.

    Attributes:
        benchmarks: names, or ``NAME=PATH``.
        engine: ``embedded``, ``vllm``, or an address.
    """

    benchmarks: Sequence[str]
    samples: int
    temperature: float
    max_tokens: int
    limit: int | None
    engine: str

    def configs(self) -> list[BenchmarkConfig]:
        """Return the benchmarks. Raises ConfigError if one does not exist or is given twice, or samples are equal."""
        named = [word.strip().partition("=") for word in self.benchmarks]
        names = [name for name, _, _ in named]
        unknown = [name for name in names if name not in benchmarks()]
        if unknown:
            raise ConfigError(f"{unknown[0]} is not a benchmark", remedy=f"choose among {', '.join(benchmarks())}")
        if (lack := needed_package(names)) is not None:
            raise ConfigError(lack, remedy="pip install if-verifiable")
        if len(set(names)) < len(names):
            raise ConfigError(f"{', '.join(names)}: a benchmark is given twice", remedy="name each once")
        if self.samples > 1 and self.temperature == 0:
            raise ConfigError(f"{self.samples} greedy samples are all equal", remedy="set --temperature 0.6")
        return [
            BenchmarkConfig.model_validate({"name": name, "path": path or None, "max_problems": self.limit})
            for name, _, path in named
        ]


def evaluate(model: str, asked: Asked, *, out: Path | None) -> tuple[dict[str, Score], Path]:
    """Return the scores of a model and their directory; a directory of results is only read.

    Raises:
        LachesisError: the model, a benchmark's data or the engine is unavailable.
    """
    place = Path(model)
    if (place / RESULTS).is_file():
        return read_results(place), place
    of_run = run_paths(place)["config"].is_file()
    out = results_directory(model) if out is None else out
    configs = asked.configs()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lachesis-eval-") as scratch:
        path = _model_of(place, Path(scratch)) if of_run else model
        with _served(path, asked.engine, logs=out) as engine:
            config = ModelConfig(path=path)
            suite = Suite(
                asked=configs,
                engine=engine,
                tokenizer=load_tokenizer(config),
                params=SamplingParams(max_tokens=asked.max_tokens, temperature=asked.temperature),
                context=context_length(config),
                samples=asked.samples,
            )
            try:
                found = suite.scores(0)
            finally:
                suite.close()
    write_results(out, found, model=model)
    return found, out


def results_directory(model: str) -> Path:
    """Return where the results of a model, a run or a directory of results are, unless another place is named."""
    place = Path(model)
    if (place / RESULTS).is_file():
        return place
    paths = run_paths(place)
    return paths["evaluations"] / "benchmarks/final" if paths["config"].is_file() else Path("evals") / place.name


def require_apart(model: str, against: str, *, out: Path | None) -> None:
    """Raise ConfigError if the results of one model would replace those of the other."""
    here = results_directory(model) if out is None else out
    if here.resolve() == results_directory(against).resolve():
        raise ConfigError(f"the results of {model} and of {against} would both be in {here}", remedy="set --out")


def _model_of(run: Path, scratch: Path) -> str:
    """Return the directory of a run's final model, an adapter's merged with its base. Raises CheckpointError."""
    final = run_paths(run)["final"]
    if (final / "adapter_config.json").is_file():
        return str(export(run, scratch / "model", merge=True))
    if not final.is_dir():
        raise ConfigError(f"{run} has no final model", remedy="let the run end, or name an exported RUN/models/step_N")
    return str(final)


@contextmanager
def _served(model: str, engine: str, *, logs: Path) -> Iterator[HttpEngine]:
    """Start a server of the model, unless ``engine`` is the address of one; its log stays in the directory ``logs``."""
    if engine in ("embedded", "vllm"):
        options = ServeOptions.model_validate({"model": model, "engine": engine, "port": free_port()})
        command = [sys.executable, "-m", "lachesis", "serve", *options.command_line()]
        server = ManagedProcess(command, url=options.url, log_path=logs / "engine.log")
    else:
        options, server = None, None
    client = HttpEngine([engine if options is None else options.url])
    try:
        deadline = Deadline(f"the start of a server of {model}", _START_S)
        if server is not None:
            server.start(deadline=deadline)
        client.connect(deadline=deadline)
        yield client
    finally:
        client.close()
        if server is not None:
            server.stop()
