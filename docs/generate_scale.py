"""Writes scale.md from the cost model and the memory that plan counts: ``python docs/generate_scale.py``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lachesis.config.schema import LachesisConfig
from lachesis.plan.cards import GB
from lachesis.plan.shapes import FoundShape, find_shape
from lachesis.plugins.planning.cost import Scale, scale

TARGET = Path(__file__).with_name("scale.md")
MODELS = {
    "8B": "Qwen/Qwen3-8B",
    "14B": "Qwen/Qwen3-14B",
    "24B": "mistralai/Mistral-Small-24B-Base-2501",
    "70B": "meta-llama/Llama-3.1-70B",
    "235B-A22B": "Qwen/Qwen3-235B-A22B",
}
CLUSTERS = ((8, 1), (64, 8))
CARDS = (80,)
ALONE: Mapping[str, int] = {}
# Of the mixture among the models.
MIXTURE = "235B-A22B"
SHARED = (ALONE, {"expert_parallel_size": 8})

INTRODUCTION = """\
# Scale: from one GPU to many

<!-- Written by docs/generate_scale.py from src/lachesis/plugins/planning/cost.py; do not edit. -->

`lachesis plan config.yaml --gpus 64 --nodes 8 --card 80` says for your configuration what the tables below say for five
models.

| you have | do this |
|---|---|
| one node or less | [one GPU](start/one-gpu.md), [two GPUs](tutorials/two-gpus.md), [eight GPUs](start/eight-gpus.md) |
| several nodes | `lachesis cluster slurm` |
| long sequences | `distributed.context_parallel_size` ([all splits](several-gpus.md#how-training-is-split)) |
| a mixture of experts | `distributed.expert_parallel_size` |

## Several nodes

The configuration is the one of a single machine. The [tutorial](tutorials/cluster.md) tries it on a CPU.

```bash
lachesis cluster slurm config.yaml --nodes 4 --gpus-per-node 8 --time 24:00:00 > job.sh
sbatch job.sh
```

- **Who does what.** vLLM's servers get the last nodes, the other nodes train with a rank for each GPU. A layout that
  cannot work is refused before anything is printed.
- **Before it starts**, `lachesis cluster preflight` checks versions, GPUs, ports, an all-reduce, the disk and clocks,
  within 30 s, and names the node that does not fit.
- **Shared disk.** Configuration, Python and run directory have to be on a disk that all nodes share.
- **Failures.** An engine is started again on its node. If a rank dies, the job is queued again up to three times
  (`--restarts`), and continues from the last checkpoint: set `checkpoint.every_steps`. 300 s (`--notice`) before its
  time limit it saves and is queued again. Errors that would come again end it at once.
- **Secrets** are drawn when the job starts.
- **Logs** of engines are in `runs/NAME-slurm/JOB/`, those of the run in `runs/NAME/logs/`.

No real cluster has run such a job. Tests run the file with processes of one machine.

## Loading and saving

- A rank reads only its own rows of the safetensors files.
- Each rank writes its part of a checkpoint, and any number of ranks continues from it. `checkpoint.format: whole` lets
  rank 0 write all.
- With `checkpoint.asynchronous` training waits only for a copy to pinned host memory
  ([measured](../benchmarks/RESULTS.md#what-a-checkpoint-of-8b-copies)), which takes up to twice the bytes of the rank's
  part. A kill leaves the checkpoint before.
- The final model is written as it is gathered, in files of at most 512 MiB.

## Tested so far

One, two and four GPUs of one host: sharded training, trainer and engine apart
([measured](../benchmarks/RESULTS.md#two-gpus-train-and-two-generate)), and both on the same two GPUs
([measured](../benchmarks/RESULTS.md#two-gpus-train-and-generate-in-turn)). Tests hold layouts of up to eight ranks on
CPUs against one process, to 1e-9 in float64. Eight GPUs and several nodes have not run. The tables below are
**calculated**.

All weights trained by AdamW with `model.gradient_checkpointing`, bfloat16, sequences and micro-batches of 8,192 tokens;
the last column is for LoRA. Half of the GPUs train, or three quarters where that is too large. "Copy" is that of
`checkpoint.asynchronous`, in a rank's host memory.
"""


def planned(
    model: FoundShape, *, gpus: int, nodes: int, card: float, lora: bool = False, shared: Mapping[str, int] = ALONE
) -> Scale:
    """Of the configuration that the page is about, with groups of devices of these sizes."""
    data: dict[str, Any] = {
        "run": {"steps": 10},
        "model": {"path": "of-the-table", "gradient_checkpointing": True},
        "data": {"path": "data.jsonl", "max_prompt_length": 1024},
        "rewards": {"functions": ["rewards.right"]},
        "sampling": {"max_completion_length": 7168},
        "engine": {"kind": "http"},
        "bridge": {"kind": "lora_nccl"} if lora else {"kind": "broadcast"},
        "adapter": {"kind": "lora"} if lora else {"kind": "none"},
        "distributed": dict(shared),
    }
    return scale(LachesisConfig.model_validate(data), gpus=gpus, nodes=nodes, card_gb=card, found=model)


def table(card: int) -> Iterator[str]:
    """Rows for one size of cards."""
    yield f"\n## Cards of {card} GB\n"
    columns = ("model", "GPUs (nodes)", "train + generate", "engines", "a rank", "checkpoint, copy")
    yield f"| {' | '.join(columns)} | loading: a node's memory | with LoRA: a rank |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, model in MODELS.items():
        found = find_shape(model)
        assert found is not None, model
        for gpus, nodes in CLUSTERS:
            full, lora = (planned(found, gpus=gpus, nodes=nodes, card=card, lora=kind) for kind in (False, True))
            yield " | ".join(("| " + name, f"{gpus} ({nodes})", *cells(full), rank(lora) + " |"))


def shared_out() -> Iterator[str]:
    """Rows of a mixture whose ranks share its experts."""
    found = find_shape(MODELS[MIXTURE])
    assert found is not None
    rows = [[planned(found, gpus=512, nodes=64, card=card, shared=sizes) for card in CARDS] for sizes in SHARED]
    yield f"\n## Experts shared out\n\nOf {MIXTURE} on 512 GPUs (64 nodes), all weights trained: memory of a rank.\n"
    columns = [f"cards of {card} GB, {one.layout.train} ranks" for card, one in zip(CARDS, rows[0], strict=True)]
    yield f"| `expert_parallel_size` | {' | '.join(columns)} |"
    yield "|---|" + "---|" * len(CARDS)
    for sizes, row in zip(SHARED, rows, strict=True):
        named = str(sizes.get("expert_parallel_size", 1))
        yield "| " + " | ".join((named, *(f"{one.rank / GB:.0f} GB" for one in row))) + " |"


def cells(found: Scale) -> Iterator[str]:
    """Of full training."""
    layout = found.layout
    yield f"{layout.train} + {layout.generate}"
    yield f"{layout.engines} x TP{layout.tensor_parallel}"
    yield rank(found)
    yield f"{found.checkpoint / GB:,.0f} GB, {found.copy / GB:,.0f} GB"
    yield f"{found.host / GB:,.0f} GB"


def rank(found: Scale) -> str:
    """Memory of a rank, and whether it is there."""
    size = f"{found.rank / GB:.0f} GB"
    if found.rank > found.card:
        return f"{size}: too large"
    return size if found.fits else f"{size}; an engine is too large"


def render() -> str:
    """The whole page."""
    lines = [*(line for card in CARDS for line in table(card)), *shared_out()]
    return INTRODUCTION + "\n".join(lines) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render())
