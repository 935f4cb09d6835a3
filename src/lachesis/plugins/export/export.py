"""Export of a run's checkpoint or final model in the formats of transformers, peft and llama.cpp."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from lachesis.common.chatter import without_chatter
from lachesis.common.errors import CheckpointError, ConfigError
from lachesis.common.files import write_atomic
from lachesis.common.run_files import run_paths
from lachesis.config.load import load_config
from lachesis.config.schema import LachesisConfig, ModelConfig, NoAdapterConfig
from lachesis.engines.embedded.adapters import is_adapted
from lachesis.plugins.export.card import CARD, model_card
from lachesis.plugins.export.gguf import convert_to_gguf, find_converter
from lachesis.run.directory import note_step, noted_step
from lachesis.train.checkpoint import Checkpoint, CheckpointManager, save_model
from lachesis.train.model.loading import LoadedModel, load_model

Format = Literal["safetensors", "gguf"]

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def export(source: Path, out: Path | None = None, *, merge: bool = False, to: Format = "safetensors") -> Path:
    """Write the model or adapter of a run with tokenizer and model card, in a separate directory.

    Args:
        source: a run, whose latest whole checkpoint is taken; one of its checkpoints,
            ``RUN/checkpoints/step_N``; or ``RUN/final``. With ``merge`` or GGUF, a run stands for its final model
            unless a checkpoint is newer.
        out: target; ``RUN/models/step_N`` if unset.
        merge: add an adapter to the weights of its base model, which gives an ordinary model.
        to: ``gguf`` has llama.cpp's converter write ``model.gguf`` beside the model, or into ``out``; an adapter is
            merged first.

    Returns:
        The directory of the model, or the GGUF file.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or of another model, or nothing can be written.
        DataError: the run's metrics are malformed.
        DependencyError: llama.cpp's converter is not installed, or fails.
        ConfigError: there is no adapter to merge, or the run's configuration cannot be read.
        ModelError: the model that the run started from cannot be loaded.
    """
    converter = find_converter() if to == "gguf" else None  # checked before anything is loaded
    run_dir, name = _place(Path(source))
    config = load_config(run_paths(run_dir)["config"]).config
    adapts = config.adapter.kind != "none"
    if merge and not adapts:
        raise ConfigError(
            f"the run {run_dir} trains all weights, so there is no adapter to merge", remedy="export it without merging"
        )
    merge = merge or (to == "gguf" and adapts)
    manager = CheckpointManager(run_paths(run_dir)["checkpoints"], keep_last=config.checkpoint.keep_last)
    if name == "final" or (name is None and (merge or to == "gguf") and _final_is_newest(run_dir, manager)):
        directory = _export_final(run_dir, out, config=config, merge=merge, as_gguf=to == "gguf")
    else:
        checkpoint = _loaded(manager, None if name is None else int(name.removeprefix("step_")), run_dir)
        loaded = _load_trained(config, checkpoint)
        directory = out or run_dir / "models" / f"step_{checkpoint.step:06d}"
        _save(_merged(loaded, config.model) if merge else loaded, directory)
        _describe(directory, run_dir, step=checkpoint.step, merged=merge)
    return directory if converter is None else convert_to_gguf(directory, out or directory, converter)


def _final_is_newest(run_dir: Path, manager: CheckpointManager) -> bool:
    final, latest = run_paths(run_dir)["final"], manager.latest()
    if not final.is_dir():
        return False
    step = noted_step(final)
    return latest is None or step is None or step >= latest


def _export_final(run_dir: Path, out: Path | None, *, config: LachesisConfig, merge: bool, as_gguf: bool) -> Path:
    """Export the model at the end of a run, with its adapter merged, or unchanged for a GGUF file of it."""
    final = run_paths(run_dir)["final"]
    is_adapter = (final / "adapter_config.json").is_file()
    if as_gguf and not is_adapter:
        return final
    if not (merge and is_adapter):
        raise _is_model_already(run_dir)
    tensors = load_file(final / "adapter_model.safetensors")
    base = load_model(_plain(config.model, dtype=_dtype_of(tensors.values())), NoAdapterConfig(kind="none"))
    with without_chatter():
        from peft import PeftModel
    adapted = PeftModel.from_pretrained(base.model, str(final))  # pyright: ignore[reportArgumentType]
    step = noted_step(final)
    directory = out or run_dir / "models" / ("final" if step is None else f"step_{step:06d}")
    _save(_merged(replace(base, model=adapted), config.model), directory)
    _describe(directory, run_dir, step=step, merged=True)
    return directory


def _is_model_already(run_dir: Path) -> CheckpointError:
    final = run_paths(run_dir)["final"]
    hint = "; --merge adds it to its base model" if (final / "adapter_config.json").is_file() else ""
    return CheckpointError(
        f"the trained model of the run {run_dir} is {'an adapter' if hint else 'a model'} already, not a checkpoint",
        remedy=f"use {final} unchanged{hint}",
    )


def _merged(loaded: LoadedModel, config: ModelConfig) -> LoadedModel:
    """Merge the adapter into the base model at the adapter's precision, in the base's own dtype."""
    assert is_adapted(loaded.model), "the configuration has an adapter"
    _part_adapted_head(loaded.transformer)
    merged: Any = loaded.model.merge_and_unload()  # pyright: ignore[reportCallIssue]
    options = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    own = AutoConfig.from_pretrained(config.path, **options).dtype
    model = merged if own is None else merged.to(own)
    return replace(loaded, model=model, transformer=model)


def _part_adapted_head(model: PreTrainedModel) -> None:
    """Give a head with an adapter its own weight: merged into a tied one, the adapter would change embeddings too."""
    head: Any = model.get_output_embeddings()
    inner: Any = model.get_input_embeddings()
    if hasattr(head, "base_layer") and head.base_layer.weight is inner.weight:
        head.base_layer.weight = nn.Parameter(inner.weight.detach().clone(), requires_grad=False)
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False


def _save(loaded: LoadedModel, directory: Path) -> None:
    save_model(loaded.model, loaded.tokenizer, directory, write=loaded.writer())


def _describe(directory: Path, run_dir: Path, *, step: int | None, merged: bool) -> None:
    if step is not None:
        note_step(directory, step)
    if run_paths(run_dir)["metrics"].exists():  # before the first step the card has nothing to report
        write_atomic(directory / CARD, model_card(run_dir, step=step, merged=merged))


def _place(source: Path) -> tuple[Path, str | None]:
    """Return the run, and the name of its checkpoint or ``final``; ``None`` means the latest checkpoint."""
    source = source.absolute()
    if run_paths(source)["config"].is_file():
        return source, None
    if source.is_dir() and source.name == "final" and run_paths(source.parent)["config"].is_file():
        return source.parent, "final"
    run_dir, name = source.parent.parent, source.name
    number = name.removeprefix("step_")
    if source.is_dir() and name != number and number.isdigit() and run_paths(run_dir)["config"].is_file():
        return run_dir, name
    raise CheckpointError(
        f"{source} is neither a checkpoint in a run's directory nor a run",
        remedy="name RUN/checkpoints/step_N in a directory with RUN/config.yaml, or RUN for its latest checkpoint",
    )


def _loaded(manager: CheckpointManager, step: int | None, run_dir: Path) -> Checkpoint:
    if step is None and manager.latest() is None:
        if run_paths(run_dir)["final"].is_dir():
            raise _is_model_already(run_dir)
        raise CheckpointError(
            f"the run {run_dir} has no whole checkpoint",
            remedy="runs write one when they are stopped, and every checkpoint.every_steps steps",
        )
    return manager.load(step)


def _load_trained(config: LachesisConfig, checkpoint: Checkpoint) -> LoadedModel:
    """Load the model that the run started from, on the CPU, with the checkpoint's trained tensors."""
    # The adapter that training started from, if any, is in the checkpoint, so its files are no longer needed.
    adapter = config.adapter.model_copy(update={"path": None}) if config.adapter.kind == "lora" else config.adapter
    loaded = load_model(_plain(config.model, dtype=_dtype_of(checkpoint.tensors.values())), adapter)
    own = dict(loaded.model.named_parameters())
    wrong = [n for n, t in checkpoint.tensors.items() if n not in own or own[n].shape != t.shape]
    if wrong:
        raise CheckpointError(
            f"the checkpoint of step {checkpoint.step} is of another model than {config.model.path}: {len(wrong)} "
            f"tensors differ, among them {sorted(wrong)[0]}",
            remedy="restore the model that the run was started with",
        )
    with torch.no_grad():
        for name, tensor in checkpoint.tensors.items():
            own[name].copy_(tensor)
    return loaded


def _plain(model: ModelConfig, *, dtype: str) -> ModelConfig:
    """Return the configuration of the model without options for training."""
    return model.model_copy(
        update={
            "device": "cpu",
            "dtype": dtype,
            "quantization": "none",
            "matmul_dtype": "auto",
            "gradient_checkpointing": False,
            "activations": "keep",
            "train_layers": None,
        }
    )


def _dtype_of(tensors: Iterable[Tensor]) -> str:
    """Return the dtype that most of the trained numbers have."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        sizes[tensor.dtype] += tensor.numel()
    return _DTYPES.get(sizes.most_common(1)[0][0], "auto") if sizes else "auto"
