"""Bridge to transformers' callbacks: it reports a run's steps and evaluations to them, and obeys their requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from lachesis.common.types import EvalResult, StepRecord
from lachesis.metrics.hub import Sink

# Our names of metrics, and TRL's.
_NAMES = {
    "router_aux_loss": "aux_loss",
    "zero_std_fraction": "frac_reward_zero_std",
    "completion_length/mean": "completions/mean_length",
    "completion_length/max": "completions/max_length",
    "truncated_fraction": "completions/clipped_ratio",
    "clipped_fraction": "clip_ratio/region_mean",
    "clip_fraction_low": "clip_ratio/low_mean",
    "clip_fraction_high": "clip_ratio/high_mean",
}


def trl_name(name: str) -> str:
    """Return TRL's name of a metric; ours if it has none. A reward's own metrics have their bare names in TRL."""
    return _NAMES.get(name, name.removeprefix("reward_metrics/"))


def evaluation_metrics(result: EvalResult) -> dict[str, float]:
    """Return an evaluation under the names that ``evaluate()`` returns."""
    found = {"eval_reward": result.mean_reward, "eval_accuracy": result.accuracy, "eval_runtime": result.seconds}
    if result.pass_at_k is not None:
        found[f"eval_pass@{result.samples}"] = result.pass_at_k
    return found | {"eval_completions/mean_length": result.mean_length, "eval_problems": float(result.problems)}


class BestModel:
    """Record of the best evaluation so far, by the metric that the arguments name."""

    def __init__(self, metric: str, *, greater_is_better: bool) -> None:
        self.metric = metric if metric.startswith("eval_") else f"eval_{metric}"
        self._sign = 1.0 if greater_is_better else -1.0
        self.value: float | None = None
        self.step: int | None = None

    def take(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Return True if this evaluation is the best. Raises KeyError if it lacks the metric."""
        if self.metric not in metrics:
            raise KeyError(f"the evaluation has no {self.metric}; it has {', '.join(sorted(metrics))}")
        value = metrics[self.metric]
        if self.value is not None and self._sign * (value - self.value) <= 0:
            return False
        self.value, self.step = value, step
        return True


class CallbackSink(Sink):
    """Sink that calls callbacks as transformers' trainer would, in its order, before the next step begins.

    An exception of a callback ends the run and is kept in :attr:`error`.

    Args:
        handler: the callbacks, with the objects that they receive.
        args: the arguments, as ``GRPOConfig``.
        state, control: as of transformers' trainer.
        best: record of the best evaluation; ``None`` if not wanted.
        epoch_of: number of passes over the data by a step; ``None`` if unknown.
        stop, save: ask the run to end, and to save a checkpoint.
        keep: keeps the checkpoint of the best evaluation, given its step, and removes old ones; ``None``
            to keep the last model.
    """

    waited_for = True

    def __init__(
        self,
        handler: CallbackHandler,
        *,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        best: BestModel | None,
        epoch_of: Callable[[int], float | None],
        stop: Callable[[], None],
        save: Callable[[], None],
        keep: Callable[[int], None] | None,
    ) -> None:
        self._handler, self._args, self._state, self._control = handler, args, state, control
        self._best, self._epoch_of, self._stop, self._save, self._keep = best, epoch_of, stop, save, keep
        self._since: list[Mapping[str, float]] = []
        self.error: BaseException | None = None

    def write(self, record: StepRecord) -> None:
        if self.error is None:
            self._guarded(lambda: self._step(record))

    def unlogged(self) -> dict[str, float]:
        """Return the means of the metrics since the last line of the history, which TRL adds to the next line."""
        since, self._since = self._since, []
        return _means(since)

    def evaluation(self, result: EvalResult) -> None:
        """Take the evaluation before the first step, which transformers makes only with ``eval_on_start``."""
        if self.error is None and self._args.eval_on_start:
            self._guarded(lambda: self._evaluated(result))

    def _guarded(self, tell: Callable[[], None]) -> None:
        try:
            tell()
        except Exception as error:  # train() raises it when the run has ended
            self.error = error
            self._stop()

    def _step(self, record: StepRecord) -> None:
        args, state, control = self._args, self._state, self._control
        state.global_step = record.step
        state.epoch = self._epoch_of(record.step) or 0.0
        handler = self._handler
        control = handler.on_step_begin(args, state, control)
        control = handler.on_step_end(args, state, control)
        self._since.append(record.values)
        if record.step % max(1, int(state.logging_steps or 1)) == 0:
            self._log(self.unlogged())
        if record.evaluation is not None:
            self._evaluated(record.evaluation)
        self._obey()

    def _evaluated(self, result: EvalResult) -> None:
        metrics = evaluation_metrics(result)
        self._log(metrics)
        self._handler.on_evaluate(self._args, self._state, self._control, metrics)
        best = self._best
        if best is not None and best.take(result.step, metrics):
            self._state.best_metric, self._state.best_global_step = best.value, best.step
            self._control.should_save |= self._keep is not None and result.step > 0
        if self._keep is not None and best is not None and best.step is not None:
            self._keep(best.step)
        self._obey()

    def _log(self, values: Mapping[str, float]) -> None:
        logs: dict[str, Any] = dict(values)
        if self._state.epoch is not None:
            logs["epoch"] = self._state.epoch
        self._state.log_history.append({**logs, "step": self._state.global_step})
        self._handler.on_log(self._args, self._state, self._control, logs)

    def _obey(self) -> None:
        if self._control.should_save:
            self._control.should_save = False
            self._save()
            self._handler.on_save(self._args, self._state, self._control)
        if self._control.should_training_stop:
            self._stop()


def _means(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the steps that have it, under TRL's names."""
    names = dict.fromkeys(name for record in records for name in record)
    return {trl_name(name): fmean(record[name] for record in records if name in record) for name in names}
