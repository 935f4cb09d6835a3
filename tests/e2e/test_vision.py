"""Models for images and text learn to read pictures."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from lachesis.common.errors import LachesisError
from lachesis.plugins.trl import GRPOConfig, GRPOTrainer
from tests import pictures
from tests.contracts.vllm_server import ENVIRONMENT, entry_point, needs_vllm
from tests.e2e.runs import metrics, rewards, run_here
from tests.e2e.test_engines import train
from tests.long import long_but
from tests.paths import SOURCE
from tests.ports import free_port

REWARD = """
def named(completions, answer, images, **columns):
    assert len(images) == len(answer)
    return [float(one[0]["content"].strip() == right) for one, right in zip(completions, answer)]
"""


# vLLM's attention on the CPU knows no heads smaller than 32.
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 96, "initializer_range": 0.15}


def write(directory: Path, *, sizes: Mapping[str, Any] = {}, **model: object) -> Path:
    """A run on pictures of four colours, given as files."""
    pictures.save(directory / "model", **sizes)
    (directory / "rewards.py").write_text(REWARD)
    (directory / "played.py").write_text("def play(prompts, trainer):\n    raise AssertionError\n")
    rows = []
    for colour in pictures.COLOURS:
        (directory / f"{colour}.png").write_bytes(pictures.png(colour))
        rows.append({"prompt": "what colour", "images": [f"{colour}.png"], "answer": colour})
    (directory / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "run": {"name": "pictures", "dir": str(directory), "steps": 16},
        "model": {"path": str(directory / "model"), **model},
        "data": {"path": str(directory / "data.jsonl"), "conversations": True},
        "rewards": {"functions": [f"{directory / 'rewards.py'}:named"]},
        "sampling": {"num_generations": 8, "max_completion_length": 1},
        "batch": {"prompts_per_step": 4},
        "optimizer": {"learning_rate": 1e-2},
        "engine": {"kind": "embedded"},
        "checkpoint": {"save_final": True},
    }
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_a_model_learns_to_name_the_colour_of_a_picture(tmp_path: Path):
    summary = run_here(write(tmp_path))
    assert metrics(summary.run_dir).steps[0].values["logprob_diff_max"] > 0
    found = rewards(summary.run_dir)
    assert fmean(found[-3:]) - fmean(found[:3]) > 0.3
    assert largest_difference(summary.run_dir) < 1e-4
    log = (summary.run_dir / "logs" / "trainer.log").read_text()
    assert "it takes images, with one row per sequence, and its vision tower is frozen" in log
    kept = [load_file(place / "model.safetensors") for place in (tmp_path / "model", summary.run_dir / "final")]
    assert kept[0].keys() == kept[1].keys()
    tower = [name for name in kept[0] if "vision_model" in name or "connector" in name]
    assert tower
    assert all(torch.equal(kept[0][name], kept[1][name]) for name in tower)
    saw_it_in_transformers(summary.run_dir / "final")


@needs_vllm
@pytest.mark.long("test_vllm_images.py::test_logprobs_with_images_are_the_trainers: and beside it the steps of a run")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["broadcast", "lora_only"])
def test_a_run_over_vllm_learns_from_what_the_trainer_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    monkeypatch.setenv("LACHESIS_SESSION_DIR", str(tmp_path / "sessions"))
    path = os.pathsep.join([str(SOURCE), str(entry_point(tmp_path / "plugin"))])
    config = write(tmp_path, sizes=SIZES)
    document = yaml.safe_load(config.read_text())
    learns = kind == "broadcast"
    document["run"]["steps"], document["optimizer"]["learning_rate"] = (20, 5e-4) if learns else (3, 1e-3)
    document["sampling"]["num_generations"] = 16 if learns else 8
    document["engine"] = {"kind": "vllm", "port": free_port(), "max_model_len": 32, "enforce_eager": True}
    document["bridge"] = {"kind": kind}
    if kind == "lora_only":
        document["adapter"] = {"kind": "lora", "r": 8}
    config.write_text(yaml.safe_dump(document))
    done = train(config, **ENVIRONMENT, PYTHONPATH=path)
    assert done.code == 0, done.err
    run_dir = tmp_path / "pictures"
    assert 0 < largest_difference(run_dir) < 1e-3
    assert all(step.values["canary_error"] < 1e-3 for step in metrics(run_dir).steps)
    if learns:
        found = rewards(run_dir)
        assert fmean(found[-3:]) - fmean(found[:3]) > 0.3, found


LOOK = """
from pathlib import Path

from PIL import Image

def look() -> str:
    'Look at the picture again.'
    return "what colour"

def picture() -> list:
    'Look at another picture.'
    return ["what colour", Image.open(Path(__file__).parent / "blue.png")]

def asks(text):
    return text, [{"name": NAME, "arguments": {}}]
"""


@pytest.mark.parametrize("tool", ["look", "picture"])
def test_tools_are_called_over_turns_after_a_picture(tmp_path: Path, tool: str):
    config = write(tmp_path)
    (tmp_path / "look.py").write_text(LOOK.replace("NAME", repr(tool)))
    long = REWARD.replace('float(one[0]["content"].strip() == right)', "float(len(str(one)))")
    (tmp_path / "rewards.py").write_text(long)
    document = yaml.safe_load(config.read_text())
    document["run"]["steps"], document["sampling"]["max_completion_length"] = 2, 32
    place = tmp_path / "look.py"
    document["source"] = {"tools": [f"{place}:{tool}"], "tool_parser": f"{place}:asks", "max_turns": 3}
    config.write_text(yaml.safe_dump(document))
    run_dir = run_here(config).run_dir
    for step in metrics(run_dir).steps:
        assert step.values["tool_calls"] > 8
        assert 0 < step.values["logprob_diff_max"] < 1e-4
    lines = next((run_dir / "rollouts").glob("*.jsonl")).read_text().splitlines()
    shown = [sample.get("thumbnails", []) for sample in json.loads(lines[0])["samples"]]
    assert any(shown) == (tool == "picture")


def largest_difference(run_dir: Path) -> float:
    """Between the logprobs of engine and trainer; a step without a signal has none."""
    return max(step.values.get("logprob_diff_max", 0.0) for step in metrics(run_dir).steps)


def saw_it_in_transformers(directory: Path) -> None:
    """What was saved names colours with nothing but transformers."""
    model: Any = AutoModelForImageTextToText.from_pretrained(directory).eval()
    processor = AutoProcessor.from_pretrained(directory)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what colour"}]}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    said = []
    for colour in pictures.COLOURS:
        inputs = processor(text=[text], images=[[pictures.picture(colour)]], return_tensors="pt")
        tokens = model.generate(**inputs, max_new_tokens=1, do_sample=False)[0, -1:]
        said.append(processor.tokenizer.decode(tokens).strip() == colour)
    assert sum(said) >= 3


def test_the_tower_is_trained_where_that_is_asked_for(tmp_path: Path):
    summary = run_here(write(tmp_path, vision="trained"), "run.steps=2")
    before, after = (
        load_file(place / "model.safetensors") for place in (tmp_path / "model", summary.run_dir / "final")
    )
    name = next(name for name in before if "vision_model" in name and name.endswith("patch_embedding.weight"))
    assert not torch.equal(before[name], after[name])
    assert largest_difference(summary.run_dir) < 1e-4


@pytest.mark.parametrize(
    "passed",
    long_but(
        ["path", "object"],
        short=["object"],
        why="test_a_script_for_trl_keeps_its_images_and_its_processor[object]: the model is named",
    ),
)
def test_a_script_for_trl_keeps_its_images_and_its_processor(tmp_path: Path, passed: str):
    place = pictures.save(tmp_path / "model")
    rows = [
        {"prompt": [{"role": "user", "content": "what colour"}], "image": pictures.picture(colour), "answer": colour}
        for colour in pictures.COLOURS
    ]
    seen: list[tuple[int, int]] = []

    def named(completions, answer, image, **columns):
        seen.extend(one.size for one in image)
        return [float(one[0]["content"].strip() == right) for one, right in zip(completions, answer, strict=True)]

    model: Any = str(place) if passed == "path" else AutoModelForImageTextToText.from_pretrained(place)
    before = load_file(place / "model.safetensors")
    trainer = GRPOTrainer(
        model=model,
        processing_class=None if passed == "path" else AutoProcessor.from_pretrained(place),
        args=GRPOConfig(
            output_dir=str(tmp_path / "out"), per_device_train_batch_size=32, num_generations=8,
            max_completion_length=1, max_steps=2, learning_rate=1e-2, report_to="none", use_cpu=True,
            bf16=False,
        ),
        reward_funcs=named,
        train_dataset=Dataset.from_list(rows),
    )  # fmt: skip
    trainer.train()
    assert {*seen} == {(pictures.SIZE, pictures.SIZE)}
    after = trainer.model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert not [name for name in changed if "vision_model" in name]


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("source.rollout_func=played.py:play", "remove source.rollout_func"),
        ("model.packing=packed", "remove model.packing"),
        ("model.vision=text", "set model.path to a model for images and text"),
    ],
)
def test_what_does_not_take_images_is_refused(tmp_path: Path, override: str, remedy: str):
    with pytest.raises(LachesisError) as raised:
        run_here(write(tmp_path), override)
    assert remedy in raised.value.remedy
