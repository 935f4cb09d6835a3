"""A first run to start from: a commented configuration (``first_run.yaml``), its reward, its problems, its model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lachesis.common.errors import ConfigError

_REWARDS = '''\
"""Rewards: a number for each completion, from its text and the columns of its problem."""


def exact_match(completions, answer, **kwargs) -> list[float]:
    """1 where the completion is the answer and nothing else."""
    return [float(completion[0]["content"] == right) for completion, right in zip(completions, answer, strict=True)]
'''

_MODEL = '''\
"""The small model of the first run, with random weights and a token for each character."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SPECIAL = ["<pad>", "<bos>", "<eos>"]


def prepare(model_path: str) -> None:
    """Make the model's directory, unless it is there."""
    if (Path(model_path) / "config.json").is_file():
        return
    torch.manual_seed(0)
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *"0123456789="])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    config = Qwen2Config(
        vocab_size=len(fast),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=128,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        pad_token_id=fast.pad_token_id,
        bos_token_id=fast.bos_token_id,
        eos_token_id=fast.eos_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(model_path)
    fast.save_pretrained(model_path)
'''

# A digit that has to be written down, and which one.
_PROBLEMS = "".join(f'{{"prompt": "{digit}=", "answer": "{digit}"}}\n' for digit in range(10))


def init(directory: str | Path) -> list[Path]:
    """Write config.yaml, rewards.py, model.py and two small datasets, ready to run on a CPU.

    The model is made by model.py when the run begins: nothing is downloaded.

    Args:
        directory: made if it is not there.

    Returns:
        The files, in the order to read them in.

    Raises:
        ConfigError: one of them is there already (then nothing is written), or the directory cannot be written to.
    """
    directory = Path(directory)
    files = {
        directory / "config.yaml": Path(__file__).with_name("first_run.yaml").read_text(encoding="utf-8"),
        directory / "rewards.py": _REWARDS,
        directory / "model.py": _MODEL,
        directory / "train.jsonl": _PROBLEMS * 9,
        directory / "eval.jsonl": _PROBLEMS,
    }
    return write_new(files)


def write_new(files: Mapping[Path, str]) -> list[Path]:
    """Write files and their directories, if none of the files exists.

    Raises:
        ConfigError: one of them is there already (then nothing is written), or cannot be written.
    """
    there = [path for path in files if path.exists()]
    if there:
        raise ConfigError(
            f"{', '.join(map(str, there))} would be overwritten", remedy="choose another directory, or move them away"
        )
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write {error.filename}: {error.strerror}", remedy="choose another directory"
        ) from error
    return list(files)
