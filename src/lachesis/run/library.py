"""Training from Python: the same configuration and the same run as from a file, with objects in their places."""

from __future__ import annotations

import asyncio
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
from lachesis.run.at_exit import STOPS, hold_exit, say
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
    """Begin a run in the background, and return a handle on it at once.

    ``lachesis.train(model="Qwen/Qwen2.5-0.5B-Instruct", data=rows, rewards=[right], run={"steps": 100})``

    Args:
        config: a YAML file or a mapping to start from; the keys below are laid over it.
        model: the model's path or hub id, or the whole section.
        data: a path, rows (a list of dictionaries, a ``datasets.Dataset``, a ``DataFrame``), or the whole section, in
            which ``path`` and ``eval_path`` may be rows.
        rewards: functions, or names of functions, or the whole section.
        resume: continue from the last checkpoint in the run directory.
        overwrite: replace the run that is there.
        progress: show a line a step on standard error.
        **keys: all other sections of the configuration as mappings, such as ``run={"steps": 100}``; functions may
            stand where the YAML has their names.

    Raises:
        ConfigError: the keys are wrong, as in a file; or a run is there, or going on. What goes wrong later is
            raised by :meth:`lachesis.run.library.Run.wait`.
    """
    run = load(config, model=model, data=data, rewards=rewards, **keys)
    return run.start(
        resume=resume, overwrite=overwrite, console=SafeConsole(stderr=True, highlight=False) if progress else None
    )


def load(
    config: str | Path | Mapping[str, Any] | None = None,
    *,
    model: str | Path | Mapping[str, Any] | None = None,
    data: Any = None,
    rewards: RewardArgument | None = None,
    **keys: Any,
) -> Run:
    """Return a checked run that is not started: ``load("config.yaml").start()``.

    ``load("runs/NAME")`` is a handle on the run in that directory, to look at it or to ``start(resume=True)``.

    Args:
        config, model, data, rewards, **keys: as :func:`train`.

    Raises:
        ConfigError: the keys are wrong, as in a file, or torchrun has started several processes of this program.
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
        place = Path(config).absolute()  # also where it was moved to
        section = loaded.config.run.model_copy(update={"dir": str(place.parent), "name": place.name})
        loaded = replace(loaded, config=loaded.config.model_copy(update={"run": section}))
    return Run(loaded, given=found.given)


logger = logging.getLogger("lachesis")

# Runs share the process's random generators, its log and its device: one at a time.
_ONE_AT_A_TIME = threading.Lock()
_POLL_S = 0.2


class Run:
    """A run: what it is to do, and, once it was started, how it goes.

    All that it shows is read from its directory, so a handle on a run of another process shows that. Its methods may
    be called from any thread, also from one with a running event loop, as in Jupyter; there ``await run`` waits
    without blocking the loop.

    A program that ends while its run goes on waits for it; one that an error or
    SIGTERM has ended stops it, with a checkpoint.

    Args:
        loaded: the configuration.
        given: the objects that it names, which are kept as long as this handle is.
    """

    def __init__(self, loaded: LoadedConfig, *, given: Sequence[NamedObject] = ()) -> None:
        self._loaded = loaded
        self._given = tuple(given)
        self._asked_to_stop = threading.Event()
        self._ended: Future[RunSummary] | None = None

    @property
    def config(self) -> LachesisConfig:
        """Configuration with all keys and their defaults."""
        return self._loaded.config

    @property
    def directory(self) -> Path:
        """Run directory; empty before the start."""
        return self.config.run.directory

    def start(self, *, resume: bool = False, overwrite: bool = False, console: Console | None = None) -> Run:
        """Begin to train, in a thread; returns this handle at once.

        Args:
            resume: go on from the last checkpoint in the run directory.
            overwrite: replace a run that is there already.
            console: where progress is shown, a line a step.

        Raises:
            ConfigError: a rule forbids this configuration, the directory holds a run and neither ``resume`` nor
                ``overwrite`` says what to do with it, or this process is training already. What goes wrong later is
                raised by :meth:`wait`.
        """
        check(self.config, located=self._loaded.located, name=self._loaded.name)
        with _python_words():
            claim_run(self.directory, resume=resume, overwrite=overwrite)
        if not _ONE_AT_A_TIME.acquire(blocking=False):
            raise ConfigError(
                "this process is training already, and a process trains one run at once",
                remedy="wait() for that run or stop() it, or start this one in another process",
            )
        self._asked_to_stop.clear()
        self._ended = Future()
        hold_exit(self)
        threading.Thread(target=self._run, args=(self._ended, resume, overwrite, console), name="lachesis run").start()
        return self

    def _run(self, ended: Future[RunSummary], resume: bool, overwrite: bool, console: Console | None) -> None:
        try:
            from lachesis.run.start import start_run

            context = RunContext(console=console, stop_requested=self._asked_to_stop.is_set)
            # Bars would share lines with the progress.
            imported = hide_progress_bars if console is not None else lambda: None
            with threads_watched():
                summary = start_run(self._loaded, context, resume=resume, overwrite=overwrite, imported=imported)
        except BaseException as error:  # whatever it is, it belongs to whoever waits
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

        After the end each call loads the model anew; :func:`lachesis.parts` keeps one for many prompts.

        Args:
            prompt: a text, or messages, which go through the chat template.
            timeout_s: longest wait for the step that is under way; no limit if unset.
            **params: of :class:`~lachesis.common.types.SamplingParams`, such as ``temperature``.

        Raises:
            StopRequested: the run ends before it answers.
            DataError: the messages are malformed.
            TimeoutError: the step is longer than ``timeout_s``.
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
        """Wait for the end and return how the run ended. Ctrl-C asks it to stop after its step, and waits for that.

        Raises:
            DeadlineExceeded: it goes on after ``timeout_s`` seconds; it is not disturbed.
            ConfigError: it was not started.
            LachesisError: one of its subclasses, where the run failed.
        """
        self.join(timeout_s)
        return self._require_started().result()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait as :meth:`wait` does, but raise nothing if the run failed: :attr:`error` has its error."""
        ended = self._require_started()
        limit = None if timeout_s is None else time.monotonic() + timeout_s
        interrupted = False
        while not ended.done():
            if limit is not None and time.monotonic() >= limit:
                raise DeadlineExceeded(f"the run {self.directory} goes on after {timeout_s:g} s")
            try:
                with suppress(TimeoutError):
                    ended.exception(timeout=_POLL_S if limit is None else min(_POLL_S, limit - time.monotonic()))
            except KeyboardInterrupt:
                if interrupted:
                    raise
                interrupted = True
                self.stop()
                say(STOPS)

    def __await__(self) -> Generator[Any, None, RunSummary]:
        return asyncio.wrap_future(self._require_started()).__await__()

    def stop(self) -> None:
        """Ask the run to end after its step, with a checkpoint; :meth:`wait` says when it has."""
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
        """Error that ended the run, if it failed; :meth:`wait` raises it."""
        return self._ended.exception() if self._ended is not None and self._ended.done() else None

    @property
    def status(self) -> RunStatus:
        """Return state, step, last values and the current wait. Raises ConfigError if there is no run yet."""
        return read_status(self.directory)

    @property
    def log(self) -> MetricsLog:
        """Lines of metrics.jsonl until now; none before the first."""
        path = run_paths(self.directory)["metrics"]
        return read_metrics(path) if path.exists() else MetricsLog((), ())

    @property
    def metrics(self) -> pandas.DataFrame:
        """Table with a row per step: ``step``, ``time`` (seconds since 1970), all values, and the evaluation after it.

        Evaluations are under ``evaluation/NAME``; that from before the first step is row 0.

        Raises:
            DependencyError: pandas is not installed; :attr:`log` has the same without it.
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
        """Table with a row per completion on the tape: prompt, text, reward, advantage and so on.

        ``reward/NAME`` are those of each function, in the order of the configuration.

        Raises:
            DependencyError: pandas is not installed; :meth:`groups` has more without it.
        """
        names = _reward_names(self.log)
        rows = [
            row
            for step in tape_files(run_paths(self.directory)["rollouts"])
            for group in self.groups(step)
            for row in _rows_of(group, step=step, names=names)
        ]
        return _pandas("rollouts").DataFrame(rows)

    def groups(self, step: int) -> list[Group]:
        """Return the groups of a step, with tokens and logprobs. Raises DataError if the tape has none."""
        return read_groups(tape_path(run_paths(self.directory)["rollouts"], step))

    @property
    def report(self) -> Path:
        """Path of report.html, rewritten from the current data. Raises DataError before the first line of metrics."""
        from lachesis.plugins.report.page import write_report

        return write_report(self.directory)

    @property
    def model(self) -> Path:
        """Directory of the model, or the adapter, that the run saved at its end.

        Raises:
            DataError: it has not.
        """
        path = run_paths(self.directory)["final"]
        if not path.is_dir():
            raise DataError(
                f"{path} is not there: the run has not ended, was stopped, or checkpoint.save_final is off",
                remedy=f"wait() for it, or make a model of its last checkpoint: lachesis export {self.directory}",
            )
        return path

    def evaluate(self) -> EvalResult:
        """Evaluate the trained model on the held-out problems: the final one, or else that of the last checkpoint.

        Raises:
            ConfigError: there are no held-out problems, or the run goes on.
            LachesisError: another of its subclasses, where nothing was trained or a part cannot be built.
        """
        if self._ended is not None and not self._ended.done():
            raise ConfigError("the run is running, and a process does one at once", remedy="wait() for it, or stop()")
        with without_chatter():
            from lachesis.run.pieces import evaluate_model  # imports torch

        return evaluate_model(self.config, self._trained())

    def export(
        self, out: str | Path | None = None, *, merge: bool = False, to: Literal["safetensors", "gguf"] = "safetensors"
    ) -> Path:
        """Write the model into a separate directory, as ``lachesis export`` does; returns where it is.

        Args:
            out: where to; ``models/step_N`` in the run directory if unset.
            merge: adds a LoRA adapter to its base model's weights.
            to: ``gguf`` writes ``model.gguf`` for llama.cpp and Ollama too.

        Raises:
            LachesisError: one of its subclasses, as :func:`lachesis.plugins.export.export.export`.
        """
        with without_chatter():
            from lachesis.plugins.export.export import export  # imports torch

        return export(self.directory, None if out is None else Path(out), merge=merge, to=to)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Wait for the end; after an error in the block stop the run, and let that error pass."""
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
            return f"<lachesis.Run {self.directory}: not started>"
        return f"<lachesis.Run {self.directory}: {status.state}, step {status.step} of {status.steps}>"

    def _trained(self) -> Path:
        """Return the directory of the final model, or of that of the last checkpoint, which is exported."""
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
    """Name arguments in place of command-line flags in the remedy of an error."""
    try:
        yield
    except ConfigError as error:
        remedy = error.remedy.replace("--resume", "resume=True").replace("--overwrite", "overwrite=True")
        raise ConfigError(error.message, remedy=remedy) from error


def _pandas(what: str) -> Any:
    other, why = "log" if what == "metrics" else "groups(step)", f".{what} is a DataFrame, and pandas is not installed"
    return optional_package("pandas", why, remedy=f"pip install pandas, or use .{other}")


def _reward_names(log: MetricsLog) -> list[str]:
    values = log.steps[-1].values if log.steps else {}
    return [name.split("/")[1] for name in values if name.startswith("rewards/") and name.endswith("/mean")]


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
