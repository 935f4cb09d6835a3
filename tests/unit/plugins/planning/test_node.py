"""`lachesis plan --node 8x80` chooses who trains and who generates."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import typer
import yaml

from lachesis.config.load import load_config
from lachesis.plan.shapes import FoundShape, find_shape
from lachesis.plugins.planning.node import Node, choose_split, node_lines


def shape(model: str) -> FoundShape:
    found = find_shape(model)
    assert found is not None
    return found


SECTIONS = {
    "model": {"gradient_checkpointing": True},
    "data": {"path": "data.jsonl", "max_prompt_length": 1024},
    "sampling": {"max_completion_length": 7168},
    "batch": {"max_tokens_per_microbatch": 8192},
}


@pytest.mark.parametrize(
    ("model", "node", "sections", "train", "words"),
    [
        ("Qwen/Qwen3-8B", "8x80", {}, 4, ('devices: "4,5,6,7"', "bridge={kind: broadcast}")),
        ("Qwen/Qwen3-14B", "8x80", {}, 6, ('devices: "6,7"', "data_parallel_size: 2")),
        ("Qwen/Qwen3-32B", "8x80GB", {}, 4, ("optimizer.kind=adamw_cpu",)),
        ("Qwen/Qwen3-30B-A3B", "8x80", {"adapter": {"kind": "lora"}}, 4, ("bridge={kind: lora_nccl}",)),
    ],
)
def test_a_split_that_fits_is_chosen(build, model: str, node: str, sections, train: int, words: tuple[str, ...]):
    split = choose_split(build(**SECTIONS | sections), Node.parse(node), found=shape(model))
    assert split is not None and split.train == train
    assert all(word in " ".join(split.words) for word in words)


BARE = {"data": {"path": "data.jsonl", "max_prompt_length": 18}, "sampling": {"max_completion_length": 256}}


@pytest.mark.parametrize(
    ("model", "sections", "host"),
    [
        ("Qwen/Qwen3-32B", {}, True),
        ("Qwen/Qwen3-8B", {}, False),
        ("Qwen/Qwen3-30B-A3B", {"adapter": {"kind": "lora"}}, False),
    ],
)
def test_layers_are_recomputed_before_a_split_is_tight_or_refused(build, model: str, sections, host: bool):
    """Without it there is none for 32B; for 8B the states go to host memory; a rank of 30B-A3B takes 79.5 of 80 GB."""
    split = choose_split(build(**BARE | sections), Node(8, 80), found=shape(model))
    assert split is not None and split.train == 4
    assert "model.activations=recompute" in split.words
    assert ("optimizer.kind=adamw_cpu" in split.words) == host


def test_a_split_is_called_tight_where_a_plan_may_be_wrong_by_more_than_is_left(build):
    config, found = build(**SECTIONS), shape("Qwen/Qwen3-8B")
    for card, said in ((44, "42.4 GB: fits, but tight (plans have been up to 6.6% off)"), (46, "42.4 GB: fits")):
        node = Node(2, card)
        lines = node_lines(choose_split(config, node, found=found), node, found=found, name="c.yaml")
        (rank,) = [line for line in lines if line.startswith("  a rank")]
        assert rank.endswith(said)


def test_the_words_give_the_configuration_that_was_counted(build, tmp_path: Path):
    config = build(**SECTIONS)
    split = choose_split(config, Node(8, 80), found=shape("Qwen/Qwen3-8B"))
    assert split is not None
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    again = load_config(path, overrides=[*split.words]).config
    assert again.engine == split.config.engine and again.bridge == split.config.bridge


def test_the_command_starts_the_ranks_and_what_fits_nowhere_is_said(build):
    node, found = Node(8, 80), shape("Qwen/Qwen3-8B")
    lines = [*node_lines(choose_split(build(**SECTIONS), node, found=found), node, found=found, name="c.yaml")]
    command = shlex.split(" ".join(lines[1:3]).replace("\\", ""))
    assert command[:6] == ["torchrun", "--nproc-per-node", "4", "-m", "lachesis", "train"]
    node, found = Node(2, 24), shape("Qwen/Qwen3-32B")
    (said,) = node_lines(choose_split(build(**SECTIONS), node, found=found), node, found=found, name="c.yaml")
    assert said.startswith("no split of 2 x 24 GB fits")


@pytest.mark.parametrize("text", ["8", "1x80", "8x", "axb", "8x0"])
def test_a_node_is_gpus_and_gigabytes(text: str):
    with pytest.raises(typer.BadParameter, match="as 8x80"):
        Node.parse(text)
