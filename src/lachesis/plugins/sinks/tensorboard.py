"""TensorBoard events of a run."""

from __future__ import annotations

from pathlib import Path

from lachesis.common.imports import optional_package
from lachesis.common.types import EvalResult, StepRecord
from lachesis.metrics.hub import Sink
from lachesis.plugins.sinks.evaluation import evaluation_values


class TensorBoardSink(Sink):
    """Sink that writes every value as a scalar under its own name, and health findings as text.

    Args:
        directory: usually RUN/tensorboard.
        resume_step: the last step that counts when a run is resumed; TensorBoard hides later ones.

    Raises:
        DependencyError: the package tensorboard is not installed.
    """

    def __init__(self, directory: Path, *, resume_step: int | None = None) -> None:
        tensorboard = optional_package(
            "torch.utils.tensorboard",
            "logging.tensorboard is on but TensorBoard cannot be imported",
            remedy='pip install "lachesis[tensorboard]", or set logging.tensorboard to false',
        )
        purge_step = None if resume_step is None else resume_step + 1
        self._writer = tensorboard.SummaryWriter(log_dir=str(directory), purge_step=purge_step)

    def write(self, record: StepRecord) -> None:
        for name, value in record.values.items():
            self._writer.add_scalar(name, value, record.step)
        if record.evaluation is not None:
            self.evaluation(record.evaluation)
        for finding in record.findings:
            self._writer.add_text(f"health/{finding.rule}", finding.line, record.step)

    def evaluation(self, result: EvalResult) -> None:
        for name, value in evaluation_values(result).items():
            self._writer.add_scalar(name, value, result.step)

    def close(self) -> None:
        self._writer.close()
