"""The command ``plan``."""

from __future__ import annotations

import re
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from lachesis.cli.base import PASS_ON, Overrides, app, console
from lachesis.common.errors import ConfigError
from lachesis.config.custom import custom_parts
from lachesis.config.load import LoadedConfig, load_argv, load_config
from lachesis.config.rules import check
from lachesis.config.schema import LachesisConfig, ModelConfig
from lachesis.config.single_sources import single_configs
from lachesis.config.steps import prompts_per_generation
from lachesis.metrics.names import format_share
from lachesis.plan.plan import plan, with_images
from lachesis.plan.shapes import find_shape
from lachesis.plugins.planning.cost import scale, scale_lines
from lachesis.plugins.planning.data import check_reward_columns, sample_data
from lachesis.plugins.planning.fit import fit, fit_lines
from lachesis.plugins.planning.node import Node, choose_split, node_lines
from lachesis.plugins.planning.plan_text import card_lines, plan_lines

_CLASS = re.compile(r"^class (\w+)\(.*?(?=^\w|^@|\Z)", re.MULTILINE | re.DOTALL)
# Classes of a modeling file that text does not pass through.
_OTHER_SENSES = re.compile(r"Audio|Vision|Image|Video|Speech")
# Attention over tokens that an indexer chooses from the whole row, or with a term for each distance, or, in Doge, with
# values that it adds to the mask.
_WHOLE_ROWS = re.compile(
    r"(?:topk_indices|selected_token_mask) = self\.indexer\(|class \w+RelativeLogits\(|def prepare_dynamic_mask\("
)


def _gigabytes(text: str) -> float:
    """Return the size of a card in GB from text such as ``24`` or ``24GB``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:GB?|GiB)?", text.strip(), re.IGNORECASE)
    if found is None or float(found[1]) < 1:
        raise typer.BadParameter(f"{text!r} is not a card's size: give gigabytes, such as 24 or 24GB")
    return float(found[1])


@app.command("plan", context_settings=PASS_ON)
def plan_command(
    context: typer.Context,
    config: Annotated[str, typer.Argument(metavar="CONFIG|FLAGS", help="YAML file, or flags of `lachesis grpo`.")],
    overrides: Overrides = None,
    device: Annotated[Literal["cuda", "cpu"] | None, typer.Option(help="Device; this machine's if unset.")] = None,
    devices: Annotated[int, typer.Option(min=1, help="How many devices train, as torchrun starts them.")] = 1,
    fit_gb: Annotated[
        float | None,
        typer.Option("--fit", parser=_gigabytes, metavar="GB", help="Find changes that fit on such a card (24, 24GB)."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=2, help="Calculate for this many GPUs: a rank's memory, and the transfer.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="With --gpus: number of machines.")] = 1,
    card_gb: Annotated[float, typer.Option("--card", min=1, metavar="GB", help="With --gpus: size of a card.")] = 80,
    node: Annotated[
        Node | None,
        typer.Option(parser=Node.parse, metavar="GPUSxGB", help="Choose how to split a node's GPUs, such as 8x80."),
    ] = None,
) -> None:
    """Predict a run's batches, memory and disk, without loading the model or data."""
    loaded = _loaded([config, *context.args], overrides=overrides or [], devices=devices)
    for finding in [*loaded.findings, *check(loaded.config, located=loaded.located, name=loaded.name)]:
        console.print(f"{finding.level}: {finding.message}", style="dim" if finding.level == "note" else "yellow")
    found = find_shape(loaded.config.model.path, revision=loaded.config.model.revision, ask_hub=True)
    singles = single_configs(loaded.config)
    samples = {name: sample for name, one in singles.items() if (sample := sample_data(one)) is not None}
    longest = max((sample.longest for sample in samples.values()), default=None)
    shown = max((sample.images for sample in samples.values()), default=0)
    for name, sample in samples.items():
        check_reward_columns(singles[name], sample)
        words = f"of the first {sample.rows:,} rows{f' of {name}' if name else ''} has about {sample.longest:,} tokens"
        pictures = f", and a prompt's images take up to {sample.images:,}" if sample.images else ""
        console.print(f"the longest prompt {words}{pictures}", style="dim")
    device = device or ("cuda" if gpus or node else None)
    chosen = with_images(loaded.config) if shown else loaded.config
    if gpus is not None:
        train = devices if devices > 1 else None
        devices = scale(chosen, gpus=gpus, nodes=nodes, card_gb=card_gb, found=found, train=train).layout.train
    split = None if node is None else choose_split(chosen, node, found=found)
    if split is not None:
        chosen, devices = split.config, split.train
    counted = partial(plan, chosen, devices=devices, found=found, prompt_tokens=longest, image_tokens=shown)
    for line in plan_lines(counted(device=device)):
        console.print(line)
    if found is not None and (way := way_line(chosen.model, kind=found.shape.kind)):
        console.print(way)
    if found is not None and device != "cpu" and not (gpus or node):
        for line in card_lines(chosen, counted(device="cuda")):
            console.print(line)
    spread = partial(scale_lines, chosen, nodes=nodes, card_gb=card_gb, found=found, train=devices)
    of_gpus = () if gpus is None else spread(gpus=gpus)
    of_node = () if node is None else node_lines(split, node, found=found, name=config)
    for line in (*of_gpus, *of_node, *_share_lines(chosen), *_custom_lines(chosen)):
        console.print(line, soft_wrap=True)
    if fit_gb is not None:
        for line in fit_lines(fit(chosen, card_gb=fit_gb, devices=devices, found=found), card_gb=fit_gb):
            console.print(line)


def _loaded(words: list[str], *, overrides: list[str], devices: int) -> LoadedConfig:
    """Load a configuration from a file or from the Atropos trainer's flags."""
    if words[0].startswith("-"):
        return load_argv(words, overrides=overrides)
    if len(words) > 1:
        raise ConfigError(
            f"plan takes one file, not also {words[1]!r}", remedy="see `lachesis plan --help` for its options"
        )
    return load_config(Path(words[0]), overrides=overrides, processes=devices if devices > 1 else None)


def _share_lines(config: LachesisConfig) -> list[str]:
    """Return lines about the share that each of several sources has of the prompts of a generation."""
    total, prompts = sum(one.weight for one in config.sources), prompts_per_generation(config)
    lines = [
        f"  {one.name:<14}{prompts * one.weight / total:.3g} of {prompts} prompts ({format_share(one.weight / total)})"
        for one in config.sources
    ]
    return ["sources", *lines] if lines else []


def _custom_lines(config: LachesisConfig) -> list[str]:
    """Return lines about custom parts, which are loaded, because only loading shows that they fit."""
    if not any(kind.name != "reward" for kind, _, _ in custom_parts(config)):
        return []
    from lachesis.run.parts import check_custom_parts  # imports torch, like most such files

    found = check_custom_parts(config)
    return ["your own", *(f"  {part.kind:<18}{part.spec} ({part.key})" for part in found)]


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
    if _WHOLE_ROWS.search(source) is not None:
        return False
    if any("nn.Conv1d(" in text for text in classes.values()):
        return "def causal_conv1d_fn(" in source and "def mamba_selective_scan(" not in source
    attentions = [text for name, text in classes.items() if name.endswith("Attention")]
    alone = any("torch.matmul(" in text and "ALL_ATTENTION_FUNCTIONS" not in text for text in attentions)
    return "ALL_ATTENTION_FUNCTIONS" in source and not alone


def _modeling_file(kind: str) -> str | None:
    spec = find_spec("transformers")
    if not kind or spec is None or spec.origin is None:
        return None
    own = {"openai-gpt": "openai"}.get(kind, kind).replace("-", "_")
    paths = [
        Path(spec.origin).parent / "models" / name / f"modeling_{name}.py" for name in (own, own.removesuffix("_text"))
    ]
    return next((path.read_text(encoding="utf-8") for path in paths if path.is_file()), None)
