"""Run TRL's own tests of ``GRPOTrainer`` against ``lachesis.trl``: which of them pass, and which do not.

``python benchmarks/trl_suite.py TRL_CHECKOUT [--out FILE] [-k EXPRESSION]``, where the first is a clone of
https://github.com/huggingface/trl. Its test files are run as they are, but for what they would download: models are
drawn at random from small configurations, and the data set of 19 short texts is made from the Zen of Python.
"""

from __future__ import annotations

import argparse
import codecs
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

_OWNER = "trl-internal-testing"
_REVISION = "0" * 40
_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
_SMALL = {
    "vocab_size": 512,
    "hidden_size": 8,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 32768,
    "head_dim": 8,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_TEMPLATES = {"Qwen3": "qwen3", "Qwen2": "qwen2_5", "Llama": "llama3_2", "Mistral": "qwen2_5", "Gpt": "qwen2_5"}


def main() -> None:
    """Run the suite and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--out", type=Path, help="JSON of every test's outcome")
    parser.add_argument("-k", dest="expression", default="", help="tests to run, as pytest has it")
    parser.add_argument("--file", default="tests/test_grpo_trainer.py")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        tests = asked.checkout / asked.file
        for name in sorted(set(re.findall(rf"{_OWNER}/([\w.-]+)", tests.read_text()))):
            write_model(name, home=home, templates=asked.checkout / "trl" / "chat_templates")
        outcomes = run_tests(asked.checkout.absolute(), asked.file, expression=asked.expression, home=home)
    for kind, count in Counter(kind for kind, _ in outcomes.values()).most_common():
        sys.stdout.write(f"{count:4} {kind}\n")
    if asked.out:
        asked.out.write_text(json.dumps(outcomes, indent=1))


def run_tests(checkout: Path, file: str, *, expression: str, home: Path) -> dict[str, tuple[str, str]]:
    """Return each test's outcome (passed, failed, skipped) and the last line of its error."""
    results = home / "results.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        file,
        "-q",
        "-p",
        "trl_suite",
        f"--junitxml={results}",
        "-p",
        "no:cacheprovider",
    ]
    command += ["-k", expression] if expression else []
    places = (str(checkout), str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
    variables = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(filter(None, places))}
    subprocess.run(command, cwd=checkout, env=os.environ | variables)
    outcomes: dict[str, tuple[str, str]] = {}
    for case in ElementTree.parse(results).iter("testcase"):
        found = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        kind = "passed" if found is None else {"skipped": "skipped"}.get(found.tag, "failed")
        message = "" if found is None else found.get("message", "").partition("\n")[0][:300]
        outcomes[f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"] = (kind, message)
    return outcomes


def write_model(name: str, *, home: Path, templates: Path) -> None:
    """Write a small random model where the hub's copy would be; none if transformers has no such text model."""
    import torch
    import transformers

    kind = name.removeprefix("tiny-").partition("-")[0]
    model_class = getattr(transformers, kind, None)
    if model_class is None or kind.endswith("ConditionalGeneration"):
        return
    snapshot = home / "hub" / f"models--{_OWNER}--{name}" / "snapshots" / _REVISION
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(_REVISION)
    tokenizer = make_tokenizer(templates / f"{_template_of(kind)}.jinja")
    tokenizer.save_pretrained(str(snapshot))
    config = model_class.config_class(**_SMALL, **({"num_labels": 1} if "Sequence" in kind else {}))
    torch.manual_seed(0)
    model_class(config).save_pretrained(str(snapshot))


def _template_of(kind: str) -> str:
    return next((template for start, template in _TEMPLATES.items() if kind.startswith(start)), "qwen2_5")


def make_tokenizer(template: Path) -> Any:
    """Return a tokenizer of bytes that knows special tokens and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {token: index for index, token in enumerate((*_SPECIALS, *letters))}
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIALS[:3]))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_SPECIALS[2],
        pad_token=_SPECIALS[0],
        chat_template=template.read_text(),
    )


def zen(config: str) -> Any:
    """Return the data set of prompts that the tests load: 17 rows to train on, 2 to test on."""
    from datasets import Dataset, DatasetDict

    with redirect_stdout(io.StringIO()):
        import this
    lines = [line for line in codecs.decode(this.s, "rot13").splitlines()[2:] if line]
    prompts: list[Any] = [line.rsplit(" ", 2)[0] for line in lines]
    if config.startswith("conversational"):
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    rows = Dataset.from_dict({"prompt": prompts})
    return DatasetDict({"train": rows.select(range(17)), "test": rows.select(range(17, 19))})


# As a plugin of pytest, in the process that runs TRL's tests.


def pytest_configure(config: pytest.Config) -> None:
    """Put our trainer where TRL's is, and the data where they would be downloaded."""
    import datasets
    import trl  # pyright: ignore[reportMissingImports]  # of the checkout

    from lachesis.plugins.trl import GRPOConfig, GRPOTrainer

    trl.GRPOConfig, trl.GRPOTrainer = GRPOConfig, GRPOTrainer
    downloaded = datasets.load_dataset

    def load_dataset(
        path: str, name: str = "", *, split: str | None = None, streaming: bool = False, **more: Any
    ) -> Any:
        if path != f"{_OWNER}/zen":
            return downloaded(path, name, split=split, streaming=streaming, **more)
        found = zen(name)
        if streaming:
            found = datasets.IterableDatasetDict({part: rows.to_iterable_dataset() for part, rows in found.items()})
        return found if split is None else found[split]

    datasets.load_dataset = load_dataset


if __name__ == "__main__":
    main()
