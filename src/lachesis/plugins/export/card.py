"""Model card of a run: README.md as the Hugging Face hub reads it.

All figures are from the run's files.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from lachesis.common.objects import is_given
from lachesis.common.version import __version__
from lachesis.metrics.names import format_number
from lachesis.metrics.sinks.jsonl import MetricsLog
from lachesis.plugins.report.data import Run, date_of, descriptors, facts, headline, read_run, setting

# What a model's card is called beside it.
CARD = "README.md"
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
        name: id of the model on the hub; the lines that load it say ``MODEL`` if unset.

    Raises:
        DataError: the directory holds no run, or its metrics are malformed.
    """
    whole = read_run(run_dir)
    run = whole if step is None else replace(whole, log=_until(whole.log, step))
    base = str(setting(run.config, "model.path", ""))
    parts = [
        _metadata(run, base, merged=merged),
        f"# {Path(run_dir).resolve().name}",
        _result(run),
        _left_out(whole.log, step),
        _curve(run.log),
        _settings(run),
        _usage(run, base, name=name, merged=merged),
    ]
    words = ", ".join([base if _is_hub_id(base) else Path(base).name, *descriptors(run.config)[1:]])
    parts.append(
        f"## Trained with\n\nGRPO by Lachesis {__version__}: {words}. Rewards: "
        f"{', '.join(_rewards(run)) or 'those of its environments'}."
    )
    return "\n\n".join(part for part in parts if part) + "\n"


def _until(log: MetricsLog, step: int) -> MetricsLog:
    steps = tuple(line for line in log.steps if line.step <= step)
    return MetricsLog(steps, tuple(result for result in log.evaluations if result.step <= step))


def _metadata(run: Run, base: str, *, merged: bool) -> str:
    """Return the metadata; base model and data must be the hub's ids, not paths."""
    fields: dict[str, Any] = {"library_name": "transformers", "tags": ["grpo", "lachesis", "reinforcement-learning"]}
    if setting(run.config, "adapter.kind") == "lora" and not merged:
        fields["library_name"] = "peft"
    data = str(setting(run.config, "data.path") or "")
    fields |= {"base_model": base} if _is_hub_id(base) else {}
    fields |= {"datasets": [data]} if _is_hub_id(data) else {}
    fields["pipeline_tag"] = "text-generation"
    return f"---\n{yaml.safe_dump(fields, sort_keys=False)}---"


def _is_hub_id(name: str) -> bool:
    parts = name.split("/")
    return len(parts) == 2 and all(parts) and not name.startswith((".", "~", "/")) and not Path(name).exists()


def _result(run: Run) -> str:
    found = headline(run.log)
    begun = f"{found['first']} → " if found["first"] else ""
    rows = [(found["label"], f"{begun}{found['last']}"), *facts(run)]
    when = date_of(run.log.steps)
    rows += [("trained on", when)] if when else []
    return "## Result\n\n" + _table("", "", rows)


def _left_out(log: MetricsLog, step: int | None) -> str:
    """Return a sentence that says the run continued after the model, if it did."""
    last = log.steps[-1].step if log.steps else 0
    if step is None or last <= step:
        return ""
    return f"The model is that of step {step}. The run continued to step {last}; all figures are up to step {step}."


def _curve(log: MetricsLog) -> str:
    """Return the mean reward over the run, in parts with equally many steps."""
    points = [(line.step, line.values["reward"]) for line in log.steps if "reward" in line.values]
    if len(points) < 2:
        return ""
    size = -(-len(points) // _POINTS)
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    means = [sum(value for _, value in part) / len(part) for part in parts]
    low, high = min(0.0, *means), max(means)
    rows = [f"{'steps':>13}  mean reward"]
    for part, mean in zip(parts, means, strict=True):
        bar = "#" * round(_BAR * (mean - low) / (high - low)) if high > low else ""
        rows.append(f"{f'{part[0][0]} to {part[-1][0]}':>13}  {format_number(mean):<8} {bar}".rstrip())
    return "## Reward\n\n```\n" + "\n".join(rows) + "\n```"


def _settings(run: Run) -> str:
    rows = [(words, str(value)) for key, words in _SHOWN if (value := setting(run.config, key)) is not None]
    return "## Settings\n\n" + _table("", "", rows) if rows else ""


def _usage(run: Run, base: str, *, name: str | None, merged: bool) -> str:
    """Return the lines that load the model in transformers, vLLM and Ollama."""
    model = name or "MODEL"
    short = shlex.quote((name or run.directory.resolve().name).rpartition("/")[2])
    loader, library, server = "AutoModelForCausalLM", "transformers", f"vllm serve {model}"
    if setting(run.config, "adapter.kind") == "lora" and not merged:
        loader, library = "AutoPeftModelForCausalLM", "peft"
        rank = setting(run.config, "adapter.r", 16)
        server = f"vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules {short}={model}"
    where = "" if name else "`MODEL` is the directory with these files, or the model's id on the hub.\n\n"
    return f"""## Use it

{where}```python
from transformers import AutoTokenizer
from {library} import {loader}

model = {loader}.from_pretrained("{model}")
tokenizer = AutoTokenizer.from_pretrained("{model}")
```

```bash
{server}
```

For Ollama, from the run's directory `RUN`, with llama.cpp's converter installed:

```bash
lachesis export RUN gguf --to gguf
echo "FROM ./gguf/model.gguf" > Modelfile && ollama create {short.lower()} -f Modelfile
```"""


def _rewards(run: Run) -> list[str]:
    """Return the rewards by function name, without the directories of whoever trained."""
    names: list[str] = []
    for spec in setting(run.config, "rewards.functions") or ():
        text = str(spec.get("function")) if isinstance(spec, dict) else str(spec)
        text = text.rpartition(".")[2] if is_given(text) else text
        names.append(f"`{Path(text).name if text.startswith('/') else text}`")
    return names


def _table(left: str, right: str, rows: list[tuple[str, str]]) -> str:
    escaped = [f"| {name} | {value.replace('|', '/')} |" for name, value in rows]
    return "\n".join([f"| {left} | {right} |", "|---|---|", *escaped])
