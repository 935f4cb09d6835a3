"""Expected way of running a model in training, from the text of transformers' own file for it: nothing is imported."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from lachesis.config.schema import ModelConfig


def way_line(config: ModelConfig, *, kind: str) -> str | None:
    """Say whether a model of the ``model_type`` ``kind`` is expected to train packed; None if transformers lacks it."""
    source = _modeling_file(kind)
    if source is None:
        return None
    if config.packing != "padded" and _packs(source):
        way = "packed, a group's prompt computed once"
    else:
        way = "on padded rows, prompts not shared"
    return f"model: {kind} is expected to train {way}; a probe at the start of the run decides, and says why"


def _packs(source: str) -> bool:
    """Return True if all layers of a modeling file go through functions that training can replace."""
    if "nn.Conv1d(" in source:
        return "def causal_conv1d_fn(" in source and "def mamba_selective_scan(" not in source
    return "ALL_ATTENTION_FUNCTIONS" in source


def _modeling_file(kind: str) -> str | None:
    spec = find_spec("transformers")
    if not kind or spec is None or spec.origin is None:
        return None
    name = kind.removesuffix("_text")
    path = Path(spec.origin).parent / "models" / name / f"modeling_{name}.py"
    return path.read_text(encoding="utf-8") if path.is_file() else None
