"""A first run to start from: a commented configuration, its reward, its problems, and its model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lachesis.common.errors import ConfigError

_CONFIG = """\
# A first run: a model of a hundred thousand parameters learns to repeat a digit, in seconds on a CPU.
# Start it with `lachesis train config.yaml`; `lachesis explain KEY` says what a key means, and
# `lachesis plan config.yaml` how much memory and how many steps it takes.
run:
  name: first               # results are in runs/first; report.html there shows what happened
  steps: 100                # optimizer steps
  setup: model.py:prepare   # makes the small model below; remove it for your own model

model:
  path: .model              # or a directory or hub id, as Qwen/Qwen2.5-0.5B-Instruct

data:
  path: train.jsonl         # a problem a line: its prompt, and whatever the rewards need
  eval_path: eval.jsonl     # held out: measured before, during and after the run

rewards:
  functions: [rewards.exact_match]    # rewards.py beside this file; several are summed by `weights`

sampling:
  num_generations: 8        # completions of each prompt, which are compared with each other
  max_completion_length: 4  # tokens
  temperature: 1.0

batch:
  prompts_per_step: 32      # times num_generations: completions in one step

algorithm:
  beta: 0.001               # weight of the KL divergence to the model from before training; 0 holds no such model

optimizer:
  learning_rate: 5.0e-4     # for a model this small; 1e-6 is usual for large ones, 1e-5 with LoRA
  warmup_steps: 5

evaluation:
  every_steps: 20

# To train an adapter instead of all weights:
# adapter: {kind: lora, r: 16, alpha: 32}

# To generate with vLLM on a GPU, in a server that the run starts:
# engine: {kind: vllm, gpu_memory_utilization: 0.45}
# bridge: {kind: shared_vllm}         # one copy of the weights; lora_only with an adapter
"""

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
        directory / "config.yaml": _CONFIG,
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
