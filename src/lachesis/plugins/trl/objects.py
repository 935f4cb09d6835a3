"""Translation of objects that a TRL script passes to configuration: models to directories, LoRA to its keys."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

from peft import LoraConfig
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from transformers import AutoConfig, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel

from lachesis.common.errors import ConfigError, DataError
from lachesis.common.files import write_atomic
from lachesis.rollouts.datasets.rows import read_file, read_object

# Fields of LoraConfig that are translated, or do not affect training.
_LORA = frozenset(
    {"r", "lora_alpha", "lora_dropout", "target_modules", "task_type", "base_model_name_or_path", "peft_type"}
    | {"inference_mode", "peft_version", "revision", "auto_mapping", "runtime_config", "fan_in_fan_out"}
)


class ArgumentError(ConfigError, ValueError):
    """Error for an argument that the trainer cannot honour; TRL raises ``ValueError``."""


def save_tokenizer(processing_class: Any, place: Path) -> str:
    """Save a tokenizer object, or a processor: for images all of it, else only its tokenizer. Returns the path."""
    images = hasattr(processing_class, "image_processor")
    saved = processing_class if images else getattr(processing_class, "tokenizer", processing_class)
    saved.save_pretrained(str(place))
    return str(place)


def lora_keys(peft_config: Any, model: str) -> dict[str, Any]:
    """Return TRL's keys for a ``LoraConfig``; none for ``None``.

    Raises:
        ConfigError: it is of another kind, or asks for more than plain LoRA.
    """
    if peft_config is None:
        return {}
    if not isinstance(peft_config, LoraConfig):
        raise ArgumentError(
            f"peft_config: {type(peft_config).__name__} is not a LoraConfig", remedy="pass a LoraConfig"
        )
    plain = LoraConfig()
    asked = [
        one.name
        for one in fields(peft_config)
        if one.name not in _LORA and getattr(peft_config, one.name) != getattr(plain, one.name)
    ]
    if asked:
        raise ArgumentError(
            f"peft_config: Lachesis trains only plain LoRA, without {', '.join(asked)}",
            remedy="leave these fields out of the LoraConfig",
        )
    targets = peft_config.target_modules or _usual_targets(model)
    return {
        "use_peft": True,
        "lora_r": peft_config.r,
        "lora_alpha": peft_config.lora_alpha,
        "lora_dropout": peft_config.lora_dropout,
        "lora_target_modules": targets if isinstance(targets, str) else sorted(targets),
    }


def quantization_keys(config: Any) -> dict[str, Any]:
    """Return TRL's keys for a ``BitsAndBytesConfig``; none for ``None``.

    Raises:
        ConfigError: it is of another kind.
    """
    if config is None:
        return {}
    if not isinstance(config, BitsAndBytesConfig):
        raise ArgumentError(
            f"quantization_config: {type(config).__name__} is not a BitsAndBytesConfig",
            remedy="pass one with load_in_4bit (nf4) or load_in_8bit",
        )
    if config.load_in_8bit:
        return {"load_in_8bit": True}
    nested = {"use_bnb_nested_quant": True} if config.bnb_4bit_use_double_quant else {}
    return {"load_in_4bit": True, "bnb_4bit_quant_type": config.bnb_4bit_quant_type, **nested}


def _usual_targets(model: str) -> list[str]:
    """Return the modules that peft adapts in a model of this architecture."""
    kind = str(AutoConfig.from_pretrained(model).model_type)
    targets = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(kind)
    if targets is None:
        raise ArgumentError(
            f"peft_config: peft has no usual target_modules for models of type {kind}",
            remedy='name them, or give target_modules="all-linear"',
        )
    return list(targets)


def reward_list(reward_funcs: Any, processing_classes: Any, *, place: Path) -> list[Any]:
    """Return the reward functions as a list, with model objects saved next to ``place``, as directories.

    Raises:
        ConfigError: there are more or fewer processing classes than functions, or a model cannot judge.
    """
    functions, tokenizers = as_list(reward_funcs), as_list(processing_classes)
    if processing_classes is None:
        tokenizers *= len(functions)
    if len(tokenizers) != len(functions):
        raise ArgumentError(
            f"reward_processing_classes: their number ({len(tokenizers)}) must match that of the reward functions "
            f"({len(functions)})",
            remedy="give one for each, None for functions",
        )
    return [
        _saved_reward(function, tokenizer, place.with_name(f"{place.name}-{index}"))
        if isinstance(function, PreTrainedModel)
        else function
        for index, (function, tokenizer) in enumerate(zip(functions, tokenizers, strict=True))
    ]


def as_list(value: Any) -> list[Any]:
    """Return an argument that may be one object or several."""
    return list(value) if isinstance(value, list | tuple) else [value]


def _saved_reward(model: PreTrainedModel, tokenizer: Any, place: Path) -> str:
    model.save_pretrained(str(place))
    return save_tokenizer(tokenizer or AutoTokenizer.from_pretrained(model.name_or_path), place)


def stream_rows(dataset: Any, args: Any) -> Any:
    """Return a data set with a length: for a stream, the rows that ``args.max_steps`` steps need; otherwise all rows.

    Raises:
        ConfigError: a stream comes without ``max_steps``.
    """
    if isinstance(dataset, str | Path) or hasattr(dataset, "__len__") or not isinstance(dataset, Iterable):
        return dataset
    return [dict(row) for row in islice(dataset, rows_needed(args, "train_dataset is a stream"))]


def rows_needed(args: Any, why: str) -> int:
    """Return how many rows of endless data ``args.max_steps`` steps take. Raises ConfigError if it is unset."""
    if args.max_steps <= 0:
        raise ArgumentError(f"{why}, whose length is not known", remedy="set max_steps")
    return args.max_steps * args.per_device_train_batch_size * args.gradient_accumulation_steps


def eval_datasets(dataset: Any) -> dict[str, Any]:
    """Return data sets to evaluate on by name; one without a name is called ``""``. Streams are read to their end."""
    named = dataset if isinstance(dataset, Mapping) else {"": dataset}
    return {
        str(name): one if isinstance(one, str | Path) or hasattr(one, "__len__") else [dict(row) for row in one]
        for name, one in named.items()
    }


def write_tasks(train_dataset: Any, eval_dataset: Any, *, place: Path) -> tuple[str, int]:
    """Write the rows of both datasets to a file, the second's last. Returns the file and the number of the latter.

    Raises:
        DataError: an argument is not a dataset, or a row cannot be written as JSON.
    """
    train, held_out = ([] if one is None else _rows(one) for one in (train_dataset, eval_dataset))
    try:
        lines = [json.dumps(row) for row in (*train, *held_out)]
    except (TypeError, ValueError) as error:
        raise DataError(
            f"train_dataset: a row cannot be written as JSON: {error}", remedy="use texts, numbers, lists, mappings"
        ) from error
    place.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(place, "\n".join(lines) + "\n")
    return str(place), len(held_out)


def _rows(dataset: Any) -> list[dict[str, Any]]:
    is_path = isinstance(dataset, str | Path)
    rows = read_file(Path(dataset)) if is_path else read_object(dataset, name="train_dataset")[0]
    return [dict(row.columns) for row in rows]
