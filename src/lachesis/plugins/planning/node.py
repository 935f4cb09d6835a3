"""Split of one node's GPUs between training and generating, chosen for a configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import typer

from lachesis.config.schema import LachesisConfig
from lachesis.plan.cards import GB
from lachesis.plan.shapes import FoundShape, require_shape
from lachesis.plugins.planning.cost import engine_ways, scale, scale_lines
from lachesis.plugins.planning.fit import Change, apply_change


@dataclass(frozen=True, slots=True)
class Node:
    """A machine with ``gpus`` cards of ``card_gb`` GB, as "8x80" names it."""

    gpus: int
    card_gb: float

    @classmethod
    def parse(cls, text: str) -> Node:
        """Return the node that text such as ``8x80`` or ``8x80GB`` names."""
        found = re.fullmatch(r"(\d+)\s*x\s*(\d+(?:\.\d+)?)\s*(?:GB)?", text.strip(), re.IGNORECASE)
        if found is None or int(found[1]) < 2 or float(found[2]) < 1:
            raise typer.BadParameter(f"{text!r} is not a node: give two or more GPUs and their gigabytes, such as 8x80")
        return cls(int(found[1]), float(found[2]))


@dataclass(frozen=True, slots=True)
class Split:
    """Split that fits: the number of ranks, the values for ``--set``, and the configuration with them."""

    train: int
    words: tuple[str, ...]
    config: LachesisConfig


def choose_split(config: LachesisConfig, node: Node, *, found: FoundShape | None) -> Split | None:
    """Return the first split that fits: half of the GPUs train, three quarters, or all beside an engine that sleeps.

    Separate GPUs come first, because the engine then generates while the others train. If none fits with room to
    spare, all are tried again with activations computed twice, with the optimizer's states in host memory, and with
    both; after all that the first tight one is returned. Raises ConfigError if the model's shape is not known.
    """
    found = require_shape(config, found)
    again = [{}, {"model": {"activations": "recompute"}}] if config.model.kept_activations == "keep" else [{}]
    in_host = config.adapter.kind == "none" and config.optimizer.function is None
    states = [{}, {"optimizer": {"kind": "adamw_cpu"}}] if in_host else [{}]
    sizes = dict.fromkeys((node.gpus // 2, node.gpus * 3 // 4, node.gpus))
    tight: Split | None = None
    for state, activations, train in product(states, again, sizes):
        change = Change({**_engine_and_bridge(config, node, train=train, found=found), **activations, **state}, "")
        changed = apply_change(config, change, devices=train)
        if changed is None:
            continue
        result = scale(changed, gpus=node.gpus, nodes=1, card_gb=node.card_gb, found=found, train=train)
        split = Split(train, tuple(change.words()), changed)
        if result.fits and not result.tight:
            return split
        tight = tight or (split if result.fits else None)
    return tight


def _engine_and_bridge(
    config: LachesisConfig, node: Node, *, train: int, found: FoundShape
) -> dict[str, Mapping[str, Any]]:
    """Return the sections with which ``train`` GPUs train and vLLM has the others, or, if all train, all."""
    shared = train == node.gpus
    generating = node.gpus if shared else node.gpus - train
    ways = engine_ways(config, found, round(node.card_gb * GB), most=generating)
    place = {"enable_sleep_mode": True} if shared else {"devices": ",".join(map(str, range(train, node.gpus)))}
    sizes = {"tensor_parallel_size": ways, "data_parallel_size": max(1, generating // ways)}
    bridge = "broadcast" if config.adapter.kind == "none" else "lora_nccl"
    return {"engine": {"kind": "vllm", **place, **sizes}, "bridge": {"kind": bridge}}


def node_lines(split: Split | None, node: Node, *, found: FoundShape | None, name: str) -> Iterator[str]:
    """Yield a split, the command that starts it with the configuration ``name``, and its cost."""
    size = f"{node.gpus} x {node.card_gb:g} GB"
    if split is None:
        yield f"no split of {size} fits: `--fit {node.card_gb:g} --devices {node.gpus}` says what to change"
        return
    yield f"split of {size}: start it with"
    yield f"  torchrun --nproc-per-node {split.train} -m lachesis train {name} \\"
    yield "    " + " ".join(f"--set '{word}'" for word in split.words)
    yield from scale_lines(split.config, gpus=node.gpus, nodes=1, card_gb=node.card_gb, found=found, train=split.train)
