"""Model card of a run: README.md as the Hugging Face hub reads it.

All figures are from the run's files.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import jinja2
import yaml

from lachesis.common.objects import names_object
from lachesis.common.version import __version__
from lachesis.metrics.names import format_number
from lachesis.metrics.sinks.jsonl import MetricsLog
from lachesis.plugins.report.data import Run, date_of, descriptors, facts, headline, read_run, setting

# File name of a model's card.
CARD = "README.md"
_TEMPLATE = Path(__file__).with_name("card.md.j2")
_POINTS = 12
_BAR = 30
_SHOWN = (
    ("algorithm.loss_type", "loss"),
    ("algorithm.beta", "KL weight"),
    ("optimizer.learning_rate", "learning rate"),
    ("batch.prompts_per_step", "prompts a step"),
    ("sampling.num_generations", "completions a prompt"),
    ("sampling.max_completion_length", "longest completion, tokens"),
    ("sampling.temperature", "temperature"),
    ("adapter.r", "LoRA rank"),
    ("run.seed", "seed"),
)


def model_card(run_dir: Path, *, step: int | None = None, merged: bool = False, name: str | None = None) -> str:
    """Return the model card: what was trained, how, and with what result, as Markdown with the hub's metadata.

    Args:
        step: step of the model; later steps are left out, and the card says so.
        merged: an adapter was merged into its base model's weights.
        name: id of the model on the hub; if unset, the code that loads it has ``MODEL``.

    Raises:
        DataError: the directory holds no run, or its metrics are malformed.
    """
    whole = read_run(run_dir)
    run = whole if step is None else replace(whole, log=_until(whole.log, step))
    base = str(setting(run.config, "model.path", ""))
    adapter = setting(run.config, "adapter.kind") == "lora" and not merged
    directory = Path(run_dir).resolve().name
    last = whole.log.steps[-1].step if whole.log.steps else 0
    settings = [(words, str(value)) for key, words in _SHOWN if (value := setting(run.config, key)) is not None]
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        metadata=_metadata(run, base, adapter=adapter),
        title=directory,
        table=_table,
        result=_result(run),
        left_out=None if step is None or last <= step else {"step": step, "last": last},
        curve=_curve(run.log),
        settings=settings,
        name=name,
        short=shlex.quote((name or run.directory.resolve().name).rpartition("/")[2]),
        base=base,
        adapter=adapter,
        rank=setting(run.config, "adapter.r", 16),
        version=__version__,
        words=[base if _is_hub_id(base) else Path(base).name, *descriptors(run.config)[1:]],
        rewards=_rewards(run),
    )


def _until(log: MetricsLog, step: int) -> MetricsLog:
    steps = tuple(line for line in log.steps if line.step <= step)
    return MetricsLog(steps, tuple(result for result in log.evaluations if result.step <= step))


def _metadata(run: Run, base: str, *, adapter: bool) -> str:
    """Return the metadata; the base model and the data are given only as ids of the hub, not as paths."""
    library, data = "peft" if adapter else "transformers", str(setting(run.config, "data.path") or "")
    fields: dict[str, Any] = {"library_name": library, "tags": ["grpo", "lachesis", "reinforcement-learning"]}
    fields |= {"base_model": base} if _is_hub_id(base) else {}
    fields |= {"datasets": [data]} if _is_hub_id(data) else {}
    return yaml.safe_dump(fields | {"pipeline_tag": "text-generation"}, sort_keys=False)


def _is_hub_id(name: str) -> bool:
    parts = name.split("/")
    return len(parts) == 2 and all(parts) and not name.startswith((".", "~", "/")) and not Path(name).exists()


def _result(run: Run) -> list[tuple[str, str]]:
    found, when = headline(run.log), date_of(run.log.steps)
    begun = f"{found['first']} → " if found["first"] else ""
    last = f"{found['last']} ({found['note']})" if found["note"] else found["last"]
    return [(found["label"], f"{begun}{last}"), *facts(run), *([("trained on", when)] if when else [])]


def _curve(log: MetricsLog) -> str:
    """Return the mean reward over the run, in parts with equally many steps; empty if there is nothing to draw."""
    points = [(line.step, line.values["reward"]) for line in log.steps if "reward" in line.values]
    if len(points) < 2:
        return ""
    size = -(-len(points) // _POINTS)
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    means = [fmean(value for _, value in part) for part in parts]
    low, high = min(0.0, *means), max(means)
    rows = [f"{'steps':>13}  mean reward"]
    for part, mean in zip(parts, means, strict=True):
        bar = "#" * round(_BAR * (mean - low) / (high - low)) if high > low else ""
        rows.append(f"{f'{part[0][0]} to {part[-1][0]}':>13}  {format_number(mean):<8} {bar}".rstrip())
    return "\n".join(rows)


def _rewards(run: Run) -> list[str]:
    """Return the rewards by function name, without the user's directories."""
    names: list[str] = []
    for spec in setting(run.config, "rewards.functions") or ():
        text = str(spec.get("function")) if isinstance(spec, dict) else str(spec)
        text = text.rpartition(".")[2] if names_object(text) else text
        names.append(f"`{Path(text).name if text.startswith('/') else text}`")
    return names


def _table(rows: list[tuple[str, str]]) -> str:
    escaped = [f"| {name} | {value.replace('|', '/')} |" for name, value in rows]
    return "\n".join(["|  |  |", "|---|---|", *escaped])
