"""Expected way of running a model in training, from the text of transformers' file for it, without importing it."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from lachesis.config.schema import ModelConfig

_CLASS = re.compile(r"^class (\w+)\(.*?(?=^\w|^@|\Z)", re.MULTILINE | re.DOTALL)
# Classes of a modeling file that text does not pass through.
_OTHER_SENSES = re.compile(r"Audio|Vision|Image|Video|Speech")


def way_line(config: ModelConfig, *, kind: str) -> str | None:
    """Return a line on the expected way to train a ``model_type`` ``kind``; None if transformers lacks it."""
    source = _modeling_file(kind)
    if source is None:
        return None
    if config.packing != "padded" and _packs(source):
        way = "packed, a group's prompt computed once"
    else:
        way = "on padded rows, prompts not shared"
    return f"model: {kind} is expected to train {way}; a probe at the start of the run decides, and logs its reason"


def _packs(source: str) -> bool:
    """Return True if all layers of a modeling file use functions that training can replace."""
    classes = {found[1]: found[0] for found in _CLASS.finditer(source) if not _OTHER_SENSES.search(found[1])}
    if any("nn.Conv1d(" in text for text in classes.values()):
        return "def causal_conv1d_fn(" in source and "def mamba_selective_scan(" not in source
    attentions = [text for name, text in classes.items() if name.endswith("Attention")]
    alone = any("torch.matmul(" in text and "ALL_ATTENTION_FUNCTIONS" not in text for text in attentions)
    # Doge adds values that it computes itself to the mask of attention.
    return "ALL_ATTENTION_FUNCTIONS" in source and not alone and "def prepare_dynamic_mask(" not in source


def _modeling_file(kind: str) -> str | None:
    spec = find_spec("transformers")
    if not kind or spec is None or spec.origin is None:
        return None
    name = kind.removesuffix("_text").replace("-", "_")
    path = Path(spec.origin).parent / "models" / name / f"modeling_{name}.py"
    return path.read_text(encoding="utf-8") if path.is_file() else None
