"""The checks of `lachesis doctor`: installation, devices, a configuration, and a proof of learning."""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import yaml
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from lachesis.cli.base import busy
from lachesis.common.errors import LachesisError
from lachesis.common.imports import installed_version
from lachesis.common.version import __version__
from lachesis.config.load import load_config
from lachesis.config.rules import check
from lachesis.metrics.sinks.jsonl import read_metrics
from lachesis.run.train import train

if TYPE_CHECKING:
    from lachesis.plugins.sandbox.escapes import Runs


logger = logging.getLogger("lachesis")

REQUIRED = ("torch", "transformers", "peft", "datasets", "safetensors", "pydantic", "typer", "rich", "jinja2")
OPTIONAL = {
    "vllm": "engine as a server",
    "tensorboard": "TensorBoard sink",
    "wandb": "Weights & Biases sink",
    "torchao": "8-bit optimizers, float8 products",
    "bitsandbytes": "8-bit optimizer, quantized base weights",
}
# Packages with thousands of modules each.
_LARGE = ("torch", "transformers", "vllm")
# The proof's reward is the share of one letter among four: 0.25 by chance.
PROOF_STEPS, PROOF_RISE = 30, 0.3
_REWARD = """
def share_of_a(completions, **columns):
    texts = [completion[0]["content"] for completion in completions]
    return [text.count("a") / max(len(text), 1) for text in texts]
"""


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check: a line of the output."""

    subject: str
    message: str
    failed: bool = False


def inspect_installation() -> list[Check]:
    """Check the versions of required and optional packages, the devices, and free disk space."""
    checks = [_version_check(name) for name in REQUIRED]
    for name, purpose in OPTIONAL.items():
        version = installed_version(name) or installed_version(f"{name}-cpu")
        checks.append(Check(name, f"{version} ({purpose})" if version else f"not installed ({purpose})"))
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(i)
            free = torch.cuda.mem_get_info(i)[0] / 1e9
            bf16 = "bf16" if torch.cuda.is_bf16_supported() else "no bf16"
            checks.append(
                Check(f"cuda:{i}", f"{device.name}, {free:.0f} of {device.total_memory / 1e9:.0f} GB free, {bf16}")
            )
    else:
        checks.append(Check("gpu", f"none seen by torch {torch.__version__}; training runs on the CPU"))
    checks.append(Check("cpu", f"{torch.get_num_threads()} threads"))
    checks.append(inspect_bytecode())
    free = shutil.disk_usage(".").free / 1e9
    checks.append(Check("disk", f"{free:.1f} GB free in the current directory", failed=free < 1.0))
    return checks


def inspect_bytecode() -> Check:
    """Check that large packages are compiled to bytecode; container images often disable it."""
    found = [spec for name in _LARGE if (spec := util.find_spec(name)) is not None]
    lacking = [spec for spec in found if spec.cached and not Path(spec.cached).exists()]
    if not lacking:
        return Check("bytecode", f"{', '.join(spec.name for spec in found)}: compiled")
    directories = " ".join(str(Path(spec.origin or "").parent) for spec in lacking)
    remedy = f"run `python -m compileall -q -j 0 {directories}`"
    if sys.dont_write_bytecode:
        remedy = f"unset PYTHONDONTWRITEBYTECODE, or {remedy}"
    return Check(
        "bytecode",
        f"{', '.join(spec.name for spec in lacking)}: not compiled, so each process compiles the modules that it "
        f"imports, which can double its start time; {remedy}",
    )


def as_json(checks: Sequence[Check]) -> str:
    """Return the checks as JSON, with the versions of this package, Python and the platform."""
    machine = {"lachesis": __version__, "python": platform.python_version(), "platform": platform.platform()}
    return json.dumps({**machine, "checks": [asdict(check) for check in checks]}, indent=2)


def inspect_sandbox() -> list[Check]:
    """Check which sandbox confines code written by a model here, and try ten ways out of it.

    A machine without a sandbox passes: only rewards that run such code fail there, with an error that says so.
    """
    from lachesis.plugins.sandbox.choice import VARIABLE, open_sandbox
    from lachesis.plugins.sandbox.records import SandboxError

    kind = os.environ.get(VARIABLE) or "auto"
    if kind == "none":
        return [Check("sandbox", f"none, because {VARIABLE} says so: the model's code can do whatever you can")]
    try:
        sandbox = open_sandbox(kind, count=1)
    except SandboxError as error:
        return [Check("sandbox", f"none: {error}")]
    try:
        return _tried("sandbox", sandbox, f"{sandbox.wall}")
    finally:
        sandbox.close()


def inspect_agents_wall() -> list[Check]:
    """Check if programs of ``source.kind: agent`` can be confined here, and try the same ways out.

    A machine without such a wall passes, like one without a sandbox.
    """
    name = "agents' wall"
    if not sys.platform.startswith("linux"):
        return [Check(name, f"none: it needs Linux, but this is {sys.platform}")]
    from lachesis.plugins.sandbox.cell import CellRunner

    first, *tried = _tried(name, CellRunner(), "namespaces (network: only the model's port), seccomp, limits")
    if not tried:
        return [replace(first, failed=False)]
    return [first, *(replace(check, subject=f"{name}: {check.subject}") for check in tried)]


def _tried(name: str, sandbox: Runs, wall: str) -> list[Check]:
    """Try all ways out; return one check of the wall, and one of each way if the wall can be put up."""
    from lachesis.plugins.sandbox.escapes import try_escapes
    from lachesis.plugins.sandbox.records import SandboxError

    try:
        attempts = try_escapes(sandbox)
    except SandboxError as error:
        return [Check(name, str(error), failed=True)]
    held = sum(attempt.held for attempt in attempts)
    first = Check(name, f"{wall}: {held} of {len(attempts)} escapes blocked", failed=held < len(attempts))
    tried = [(one.name, f"escape {'held' if one.held else one.detail}", not one.held) for one in attempts]
    return [first, *(Check(subject, said, failed=failed) for subject, said, failed in tried)]


def inspect_config(path: Path) -> list[Check]:
    """Check that a configuration parses, that its parts fit together, and that its packages are installed."""
    try:
        config = load_config(path).config
        findings = check(config)
    except LachesisError as error:
        return [Check(str(path), str(error), failed=True)]
    missing = []
    if config.model.quantization != "none" and installed_version("bitsandbytes") is None:
        needed = f"not installed, but model.quantization {config.model.quantization} needs it: pip install bitsandbytes"
        missing = [Check("bitsandbytes", needed, failed=True)]
    if config.model.matmul_dtype != "auto" and installed_version("torchao") is None:
        needed = f"not installed, but model.matmul_dtype {config.model.matmul_dtype} needs it: pip install torchao"
        missing.append(Check("torchao", needed, failed=True))
    return [Check(str(path), "valid"), *missing, *(Check(finding.rule, finding.message) for finding in findings)]


def examine(config: Path | None, *, proof: bool) -> Iterator[Check]:
    """Yield all checks, each as soon as it is done, because some take a minute.

    Args:
        config: a configuration to check as well.
        proof: train a small model if nothing has failed.
    """
    failed = False
    for part in (inspect_installation, inspect_sandbox, inspect_agents_wall):
        for finding in part():
            failed |= finding.failed
            yield finding
    if config is not None:
        of_config = inspect_config(config)
        yield from of_config
        failed |= any(finding.failed for finding in of_config)
    if proof and not failed:
        with busy("training a small model"):
            yield prove_learning()


@contextmanager
def quiet() -> Iterator[None]:
    """Disable the log of runs in the block: its warnings (high learning rate, no saved weights) are intended here."""
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = False


def prove_learning() -> Check:
    """Train a small random model for about half a minute; its reward must rise by PROOF_RISE."""
    with tempfile.TemporaryDirectory(prefix="lachesis-doctor-") as directory:
        config = write_proof(Path(directory))
        try:
            with quiet():
                summary = train(load_config(config))
        except LachesisError as error:
            return Check("learning", str(error), failed=True)
        steps = read_metrics(summary.run_dir / "metrics.jsonl").steps
    rewards = [line.values["reward"] for line in steps]
    first, last = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    message = f"reward {first:.2f} -> {last:.2f} in {len(rewards)} steps ({summary.seconds:.0f} s)"
    return Check("learning", message, failed=not last - first >= PROOF_RISE)


def write_proof(directory: Path) -> Path:
    """Write model, problems, reward and configuration of the proof; returns the configuration's path."""
    write_tiny_model(directory / "model")
    prompts = [f"{a}{b}" for a in "abcd" for b in "abcd"]
    (directory / "problems.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    (directory / "share.py").write_text(_REWARD)
    config = {
        "run": {"name": "proof", "dir": str(directory / "runs"), "steps": PROOF_STEPS},
        "model": {"path": str(directory / "model")},
        "data": {"path": str(directory / "problems.jsonl")},
        "rewards": {"functions": [f"{directory / 'share.py'}:share_of_a"]},
        "sampling": {"num_generations": 8, "max_completion_length": 8},
        "batch": {"prompts_per_step": 16},
        "optimizer": {"learning_rate": 3e-3},
        "checkpoint": {"save_final": False},
    }
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def _version_check(package: str) -> Check:
    version = installed_version(package)
    return Check(package, version or "not installed: run make install, or pip install lachesis", failed=version is None)


def write_tiny_model(directory: Path) -> None:
    """Write a random model of two layers that writes a, b, c and d, the same each time, with its tokenizer."""
    torch.manual_seed(0)
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *"abcd"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(directory)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(vocabulary),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            intermediate_size=64,
            max_position_embeddings=32,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
        )
    )
    model.save_pretrained(directory)
