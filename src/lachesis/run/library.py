"""Training from Python: the same configuration and run as from a file, where values may be Python objects."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from lachesis.common.chatter import hide_progress_bars, without_chatter
from lachesis.common.errors import ConfigError, DataError, DeadlineExceeded, LachesisError
from lachesis.common.imports import optional_package
from lachesis.common.objects import NamedObject
from lachesis.common.run_files import run_paths
from lachesis.common.terminal import SafeConsole
from lachesis.common.types import EvalResult, Group, Message
from lachesis.common.world import find_world
from lachesis.config.load import LoadedConfig
from lachesis.config.objects import RewardArgument, load_objects
from lachesis.config.rules import check
from lachesis.config.schema import LachesisConfig
from lachesis.metrics.sinks.jsonl import MetricsLog, read_metrics
from lachesis.metrics.sinks.tape import read_groups, tape_files, tape_path
from lachesis.process.lost_threads import threads_watched
from lachesis.process.threads import loop_event
from lachesis.run.at_exit import hold_exit, interrupt
from lachesis.run.context import RunContext
from lachesis.run.directory import claim_run
from lachesis.run.status import RunStatus, read_status

if TYPE_CHECKING:
    import pandas

    from lachesis.run.train import RunSummary


def train(
    config: str | Path | Mapping[str, Any] | None = None,
    *,
    model: str | Path | Mapping[str, Any] | None = None,
    data: Any = None,
    rewards: RewardArgument | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = False,
    **keys: Any,
) -> Run:
    """Start a run in the background and return a handle to it at once.

    ``lachesis.train(model="Qwen/Qwen2.5-0.5B-Instruct", data=rows, rewards=[right], run={"steps": 100})``

    Args:
        config: a YAML file or a mapping to start from; the arguments below override it.
        model: the model's path or hub id, or the whole ``model`` section.
        data: a path, rows (a list of dictionaries, a ``datasets.Dataset``, a ``DataFrame``), or the whole section, in
            which ``path`` and ``eval_path`` may be rows.
        rewards: functions, or names of functions, or the whole section.
        resume: continue from the last checkpoint in the run directory.
        overwrite: replace an existing run in the directory.
        progress: draw the curve of the run in the cell of a notebook; elsewhere, print a line per step to standard
            error.
        keys: all other sections of the configuration as mappings, such as ``run={"steps": 100}``; functions may replace
            their names in the YAML.

    Raises:
        ConfigError: a key is invalid; or the directory holds a run, or one is active. Later errors are raised by
            :meth:`lachesis.run.library.Run.wait`.
    """
    run = load(config, model=model, data=data, rewards=rewards, **keys)
    return run.start(resume=resume, overwrite=overwrite, progress=progress)


def load(
    config: str | Path | Mapping[str, Any] | None = None,
    *,
    model: str | Path | Mapping[str, Any] | None = None,
    data: Any = None,
    rewards: RewardArgument | None = None,
    **keys: Any,
) -> Run:
    """Return a validated run without starting it: ``load("config.yaml").start()``.

    ``load("runs/NAME")`` returns a handle to the run in that directory, to inspect it or to ``start(resume=True)``.

    Args:
        config, model, data, rewards, **keys: as :func:`train`.

    Raises:
        ConfigError: a key is invalid, a rule rejects the configuration, or torchrun has started several processes.
    """
    world = find_world(os.environ)
    if world is not None and world.size > 1:
        raise ConfigError(
            f"this program is one of {world.size} ranks, and lachesis.train trains in one process",
            remedy="start several with torchrun and `lachesis train CONFIG`",
        )
    short = {"model": model, "data": data, "rewards": rewards}
    found = load_objects(config, {name: value for name, value in short.items() if value is not None} | keys)
    loaded = found.loaded
    if config is not None and not isinstance(config, Mapping) and Path(config).is_dir():
        place = Path(config).absolute()  # even if the directory was moved
        section = loaded.config.run.model_copy(update={"dir": str(place.parent), "name": place.name})
        loaded = replace(loaded, config=loaded.config.model_copy(update={"run": section}))
    else:  # not for an existing run, which may be looked at even if today's rules reject it
        check(loaded.config, located=loaded.located, name=loaded.name)
    return Run(loaded, given=found.given)


logger = logging.getLogger("lachesis")

# Runs share the process's random generators, its log and its device: one at a time.
_ONE_AT_A_TIME = threading.Lock()
_POLL_S = 0.2


class Run:
    """A run: its configuration and, once it was started, its progress.

    Everything is read from the run directory, so a handle can also show a run of another process. Methods may be called
    from any thread, including one with a running event loop, as in Jupyter; there ``await run`` waits without blocking
    the loop.

    A program that ends during its run waits for the run. If an error or SIGTERM ends the program, the run stops with a
    checkpoint.

    Args:
        loaded: the configuration.
        given: the objects that it names, kept alive as long as this handle.
    """

    def __init__(self, loaded: LoadedConfig, *, given: Sequence[NamedObject] = ()) -> None:
        self._loaded = loaded
        self._given = tuple(given)
        self._asked_to_stop = threading.Event()
        self._ended: Future[RunSummary] | None = None

    @property
    def config(self) -> LachesisConfig:
        """Return the configuration with all keys, defaults included."""
        return self._loaded.config

    @property
    def directory(self) -> Path:
        """Return the run directory; it does not exist before the start."""
        return self.config.run.directory

    def start(self, *, resume: bool = False, overwrite: bool = False, progress: bool = False) -> Run:
        """Start training in a thread, and return this handle at once.

        Args:
            resume: continue from the last checkpoint in the run directory.
            overwrite: replace an existing run in the directory.
            progress: as for :func:`train`.

        Raises:
            ConfigError: a rule rejects the configuration, the directory holds a run and neither ``resume`` nor
                ``overwrite`` is set, or this process is already training. Later errors are raised by :meth:`wait`.
        """
        from lachesis.plugins.report.live_curve import in_notebook

        check(self.config, located=self._loaded.located, name=self._loaded.name)
        with _python_words():
            claim_run(self.directory, resume=resume, overwrite=overwrite)
        if not _ONE_AT_A_TIME.acquire(blocking=False):
            raise ConfigError(
                "this process is already training a run, and a process trains one run at a time",
                remedy="wait() for that run or stop() it, or start this one in another process",
            )
        self._asked_to_stop.clear()
        self._ended = Future()
        hold_exit(self)
        drawn = progress and in_notebook()
        console = SafeConsole(stderr=True, highlight=False) if progress and not drawn else None
        threading.Thread(target=self._run, args=(self._ended, resume, overwrite, console), name="lachesis run").start()
        if drawn:
            self.show()
        return self

    def _run(self, ended: Future[RunSummary], resume: bool, overwrite: bool, console: Console | None) -> None:
        try:
            from lachesis.run.start import start_run

            context = RunContext(console=console, stop_requested=self._asked_to_stop.is_set)
            with threads_watched():
                summary = start_run(
                    self._loaded, context, resume=resume, overwrite=overwrite, imported=hide_progress_bars
                )
        except BaseException as error:  # any error is passed to the caller of wait()
            _ONE_AT_A_TIME.release()
            logger.error("%s", error)
            ended.set_exception(error)
        else:
            _ONE_AT_A_TIME.release()
            ended.set_result(summary)
        self._close_questions()

    def _close_questions(self) -> None:
        from lachesis.run.questions import questions_of  # imports torch

        questions_of(self.directory).close()

    def sample(
        self,
        prompt: str | Sequence[Message],
        *,
        n: int = 1,
        max_tokens: int = 256,
        timeout_s: float | None = None,
        **params: Any,
    ) -> list[str]:
        """Return ``n`` completions by the model between two steps of the run, or by its trained model after its end.

        After the end each call loads the model again; :func:`lachesis.parts` keeps one for many prompts.

        Args:
            prompt: a text, or messages, which go through the chat template.
            timeout_s: how long to wait for the current step to end, in seconds; no limit if unset.
            params: fields of :class:`~lachesis.common.types.SamplingParams`, such as ``temperature``.

        Raises:
            StopRequested: the run ends before it answers.
            DataError: the messages are malformed.
            TimeoutError: the current step took longer than ``timeout_s``.
            LachesisError: another of its subclasses, where nothing was trained or the model cannot be loaded.
        """
        if self._ended is None or self.done:
            with without_chatter():
                from lachesis.run.pieces import trained_parts

            with trained_parts(self.config, self._trained()) as parts:
                groups = parts.sample([prompt], n=n, max_tokens=max_tokens, **params)
            return [sample.text for sample in groups[0].samples]
        from lachesis.run.questions import questions_of  # imports torch

        answer = questions_of(self.directory).ask([prompt], n=n, max_tokens=max_tokens, **params)
        if self.done:
            self._close_questions()
        return [sample.text for sample in answer.result(timeout_s)[0].samples]

    def wait(self, timeout_s: float | None = None) -> RunSummary:
        """Wait for the end of the run and return its summary. Ctrl-C asks the run to stop after its current step.

        Raises:
            DeadlineExceeded: the run still trains after ``timeout_s`` seconds; it continues.
            ConfigError: the run was not started.
            LachesisError: a subclass, if the run failed.
        """
        self.join(timeout_s)
        return self._require_started().result()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait as :meth:`wait` does, but do not raise if the run failed: :attr:`error` has the error."""
        ended = self._require_started()
        limit = None if timeout_s is None else time.monotonic() + timeout_s
        interrupts = 0
        while not ended.done():
            if limit is not None and time.monotonic() >= limit:
                raise DeadlineExceeded(f"the run {self.directory} has not ended after {timeout_s:g} s; it continues")
            try:
                with suppress(TimeoutError):
                    ended.exception(timeout=_POLL_S if limit is None else min(_POLL_S, limit - time.monotonic()))
            except KeyboardInterrupt:
                interrupt(self, again=interrupts > 0)
                interrupts += 1

    def __await__(self) -> Generator[Any, None, RunSummary]:
        ended, (event, happen) = self._require_started(), loop_event()  # a task that is cancelled cancels no run
        ended.add_done_callback(lambda _: happen())
        yield from event.wait().__await__()
        return ended.result()

    def stop(self) -> None:
        """Ask the run to end after its current step, with a checkpoint; :meth:`wait` waits for the end."""
        self._require_started()
        self._asked_to_stop.set()

    @property
    def stops(self) -> bool:
        """Return True if the run was asked to stop."""
        return self._asked_to_stop.is_set()

    @property
    def done(self) -> bool:
        """Return True if the run was started by this handle and has ended."""
        return self._ended is not None and self._ended.done()

    @property
    def error(self) -> BaseException | None:
        """Return the error that ended the run, or None; :meth:`wait` raises it."""
        return self._ended.exception() if self._ended is not None and self._ended.done() else None

    @property
    def status(self) -> RunStatus:
        """Return the state, step, last metrics and current wait. Raise ConfigError if there is no run yet."""
        return read_status(self.directory)

    @property
    def log(self) -> MetricsLog:
        """Return the lines of metrics.jsonl so far."""
        path = run_paths(self.directory)["metrics"]
        return read_metrics(path) if path.exists() else MetricsLog((), ())

    @property
    def metrics(self) -> pandas.DataFrame:
        """Return a table with a row per step: ``step``, ``time`` (seconds since 1970) and all values.

        The columns ``evaluation/NAME`` have the evaluation after the step; row 0 has the one before the first step.

        Raises:
            DependencyError: pandas is not installed; :attr:`log` has the same data without pandas.
        """
        log = self.log
        rows: dict[int, dict[str, Any]] = {
            line.step: {"step": line.step, "time": line.time, **line.values} for line in log.steps
        }
        for result in log.evaluations:
            values = {f"evaluation/{name}": value for name, value in asdict(result).items() if name != "step"}
            rows[result.step] = {"step": result.step, **rows.get(result.step, {}), **values}
        return _pandas("metrics").DataFrame([rows[step] for step in sorted(rows)])

    @property
    def rollouts(self) -> pandas.DataFrame:
        """Return a table with a row per recorded completion: prompt, text, reward, advantage and so on.

        The columns ``reward/NAME`` have each function's reward, in the order of the configuration.

        Raises:
            DependencyError: pandas is not installed; :meth:`groups` has more data without pandas.
        """
        values = self.log.steps[-1].values if self.log.steps else {}
        names = [name.split("/")[1] for name in values if name.startswith("rewards/") and name.endswith("/mean")]
        rows = [
            row
            for step in tape_files(run_paths(self.directory)["rollouts"])
            for group in self.groups(step)
            for row in _rows_of(group, step=step, names=names)
        ]
        return _pandas("rollouts").DataFrame(rows)

    def groups(self, step: int) -> list[Group]:
        """Return the groups of a step, with tokens and logprobs. Raise DataError if none were recorded."""
        return read_groups(tape_path(run_paths(self.directory)["rollouts"], step))

    @property
    def report(self) -> Path:
        """Write report.html from the current data and return its path. Raise DataError if there are no metrics yet."""
        from lachesis.plugins.report.page import write_report

        return write_report(self.directory)

    def show(self) -> threading.Thread:
        """Draw the curve of rewards and held-out accuracies below a notebook's cell until the run ends.

        Returns the thread that draws it.
        """
        from lachesis.plugins.report.live_curve import show

        return show(self)

    @property
    def model(self) -> Path:
        """Return the directory of the model or adapter that the run saved at its end.

        Raises:
            DataError: the run has not saved one.
        """
        path = run_paths(self.directory)["final"]
        if not path.is_dir():
            raise DataError(
                f"{path} does not exist: the run has not ended, was stopped, or checkpoint.save_final is off",
                remedy=f"wait() for the run, or export its last checkpoint: lachesis export {self.directory}",
            )
        return path

    def evaluate(self) -> EvalResult:
        """Evaluate the final model, or else the last checkpoint's, on the held-out problems.

        Raises:
            ConfigError: there are no held-out problems, or the run is active.
            LachesisError: another subclass, if nothing was trained or a part cannot be built.
        """
        if self._ended is not None and not self._ended.done():
            raise ConfigError("the run is still active in this process", remedy="wait() for it, or stop() it")
        with without_chatter():
            from lachesis.run.pieces import evaluate_model  # imports torch

        return evaluate_model(self.config, self._trained())

    def export(
        self, out: str | Path | None = None, *, merge: bool = False, to: Literal["safetensors", "gguf"] = "safetensors"
    ) -> Path:
        """Write the model into a separate directory, as ``lachesis export`` does, and return the directory.

        Args:
            out: the directory to write; ``models/step_N`` in the run directory if unset.
            merge: merge a LoRA adapter into its base model's weights.
            to: ``gguf`` also writes ``model.gguf`` for llama.cpp and Ollama.

        Raises:
            LachesisError: a subclass, as :func:`lachesis.plugins.export.export.export`.
        """
        with without_chatter():
            from lachesis.plugins.export.export import export  # imports torch

        return export(self.directory, None if out is None else Path(out), merge=merge, to=to)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Wait for the end of the run; after an error in the block, stop the run and let the error propagate."""
        if self._ended is None:
            return
        if error is None:
            self.wait()
            return
        self.stop()
        with suppress(LachesisError):
            self.wait()

    def __repr__(self) -> str:
        try:
            status = self.status
        except ConfigError:
            return f"<lachesis.Run {self.directory}: {'not started' if self._ended is None else 'starting'}>"
        return f"<lachesis.Run {self.directory}: {status.state}, step {status.step} of {status.steps}>"

    def _trained(self) -> Path:
        """Return the directory of the final model; without one, export the last checkpoint's and return that."""
        final = run_paths(self.directory)["final"]
        return final if final.is_dir() else self.export()

    def _require_started(self) -> Future[RunSummary]:
        if self._ended is None:
            raise ConfigError(
                f"the run {self.directory} was not started by this handle",
                remedy="start() it, or sample() from its trained model",
            )
        return self._ended


@contextmanager
def _python_words() -> Generator[None]:
    """Replace command-line flags by Python arguments in the remedy of an error."""
    try:
        yield
    except ConfigError as error:
        remedy = error.remedy.replace("--resume", "resume=True").replace("--overwrite", "overwrite=True")
        raise ConfigError(error.message, remedy=remedy) from error


def _pandas(what: str) -> Any:
    other, why = "log" if what == "metrics" else "groups(step)", f".{what} is a DataFrame, and pandas is not installed"
    return optional_package("pandas", why, remedy=f"pip install pandas, or use .{other}")


def _rows_of(group: Group, *, step: int, names: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "prompt_id": group.prompt.id,
            "prompt": group.prompt.text,
            "completion": sample.text,
            "reward": sample.reward,
            "advantage": sample.advantage,
            "tokens": len(sample.completion_ids),
            "finish_reason": sample.finish_reason,
            "version": sample.versions.first,
            **{f"reward/{name}": value for name, value in zip(names, sample.rewards, strict=False)},
            **{name: values[index] for name, values in group.logged.items()},
        }
        for index, sample in enumerate(group.samples)
    ]
