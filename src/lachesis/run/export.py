"""A model that transformers or peft loads, of any checkpoint of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

from lachesis.common.errors import CheckpointError, ConfigError
from lachesis.common.files import write_atomic
from lachesis.common.run_files import run_paths
from lachesis.config.load import load_config
from lachesis.config.schema import LachesisConfig, ModelConfig
from lachesis.metrics.report.card import CARD, model_card
from lachesis.run.model_step import note_step
from lachesis.train.checkpoint import Checkpoint, CheckpointManager, save_model
from lachesis.train.model.loading import LoadedModel, load_model

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def export(source: Path, out: Path | None = None, *, merge: bool = False) -> Path:
    """Write what a checkpoint has of a model as a model of its own, or as an adapter, with tokenizer and model card.

    Args:
        source: a checkpoint, ``RUN/checkpoints/step_N``, or a run, of which the latest whole one is taken.
        out: where to; ``RUN/models/step_N`` if unset.
        merge: adds an adapter to the weights of its base model, which makes an ordinary model of it.

    Returns:
        The directory of the model.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged or of another model, or nothing can be written.
        DataError: the run's metrics are malformed.
        ConfigError: there is no adapter to merge, or the run's configuration cannot be read.
        ModelError: the model that the run started from cannot be loaded.
    """
    run_dir, step = _place(Path(source))
    config = load_config(run_paths(run_dir)["config"]).config
    if merge and config.adapter.kind == "none":
        raise ConfigError(
            f"the run {run_dir} trains all weights, so there is no adapter to merge", remedy="leave --merge out"
        )
    manager = CheckpointManager(run_paths(run_dir)["checkpoints"], keep_last=config.checkpoint.keep_last)
    checkpoint = _loaded(manager, step, run_dir)
    loaded = _load_trained(config, checkpoint)
    model: Any = loaded.model
    if merge:
        assert isinstance(model, PeftModel), "the configuration has an adapter"
        model = model.merge_and_unload()
    directory = out or run_dir / "models" / f"step_{checkpoint.step:06d}"
    save_model(model, loaded.tokenizer, directory)
    note_step(directory, checkpoint.step)
    if run_paths(run_dir)["metrics"].exists():  # before the first step there is nothing to say of it
        write_atomic(directory / CARD, model_card(run_dir, step=checkpoint.step, merged=merge))
    return directory


def _place(source: Path) -> tuple[Path, int | None]:
    """The run, and the step of a checkpoint in it; ``None`` is the latest."""
    source = source.absolute()
    if run_paths(source)["config"].is_file():
        return source, None
    run_dir, name = source.parent.parent, source.name
    number = name.removeprefix("step_")
    if source.is_dir() and name != number and number.isdigit() and run_paths(run_dir)["config"].is_file():
        return run_dir, int(number)
    raise CheckpointError(
        f"{source} is no checkpoint in a run's directory, and no run",
        remedy="name RUN/checkpoints/step_N, beside which RUN/config.yaml is, or RUN for its latest checkpoint",
    )


def _loaded(manager: CheckpointManager, step: int | None, run_dir: Path) -> Checkpoint:
    if step is None and manager.latest() is None:
        trained = run_paths(run_dir)["final"]
        raise CheckpointError(
            f"the run {run_dir} has no whole checkpoint",
            remedy=f"its trained model is {trained}, which is a model already"
            if trained.is_dir()
            else "a run has one that was stopped, or as often as checkpoint.every_steps says",
        )
    return manager.load(step)


def _load_trained(config: LachesisConfig, checkpoint: Checkpoint) -> LoadedModel:
    """The model that the run started from, on the CPU, with what the checkpoint has learned."""
    loaded = load_model(_plain(config.model, dtype=_dtype_of(checkpoint.tensors.values())), config.adapter)
    own = dict(loaded.model.named_parameters())
    wrong = [n for n, t in checkpoint.tensors.items() if n not in own or own[n].shape != t.shape]
    if wrong:
        raise CheckpointError(
            f"the checkpoint of step {checkpoint.step} is of another model than {config.model.path}: {len(wrong)} "
            f"tensors differ, among them {sorted(wrong)[0]}",
            remedy="put the model back that the run was started with",
        )
    with torch.no_grad():
        for name, tensor in checkpoint.tensors.items():
            own[name].copy_(tensor)
    return loaded


def _plain(model: ModelConfig, *, dtype: str) -> ModelConfig:
    """The same model without anything that serves its training only."""
    return model.model_copy(
        update={
            "device": "cpu",
            "dtype": dtype,
            "quantization": "none",
            "matmul_dtype": "auto",
            "residual_dtype": "auto",
            "gradient_checkpointing": False,
            "activations": "keep",
            "train_layers": None,
        }
    )


def _dtype_of(tensors: Iterable[Tensor]) -> str:
    """The dtype that most of the trained numbers have."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        sizes[tensor.dtype] += tensor.numel()
    return _DTYPES.get(sizes.most_common(1)[0][0], "auto") if sizes else "auto"
