"""Writes scale.md from the cost model and the memory that plan counts: ``python docs/generate_scale.py``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lachesis.config.schema import LachesisConfig
from lachesis.plan.shapes import FoundShape, find_shape
from lachesis.plugins.planning import cost
from lachesis.plugins.planning.cost import Scale, scale

TARGET = Path(__file__).with_name("scale.md")
MODELS = {
    "8B": "Qwen/Qwen3-8B",
    "14B": "Qwen/Qwen3-14B",
    "24B": "mistralai/Mistral-Small-24B-Base-2501",
    "70B": "meta-llama/Llama-3.1-70B",
    "235B-A22B": "Qwen/Qwen3-235B-A22B",
}
CLUSTERS = ((8, 1), (64, 8), (512, 64))
CARDS = (80, 141)
ALONE: Mapping[str, int] = {}
# Of the mixture among the models.
MIXTURE = "235B-A22B"
SHARED = (
    ALONE,
    {"expert_parallel_size": 8},
    {"expert_parallel_size": 8, "tensor_parallel_size": 2},
    {"expert_parallel_size": 8, "tensor_parallel_size": 4},
)

INTRODUCTION = """\
# From one GPU to many

<!-- Written by docs/generate_scale.py from src/lachesis/plugins/planning/cost.py; do not edit. -->

`lachesis plan config.yaml --gpus 64 --nodes 8 --card 80` says for your configuration what the tables below say for five
models: the memory of a rank, and how long loading, a transfer of the weights and a checkpoint take.

## What to choose

- **One GPU**: trainer and engine on it with one copy of the weights: `shared_vllm`, or `lora_only` with `share_base`.
  The [GPU guide](gpu-guide.md) says what fits.
- **Two GPUs**: one each, `engine: {kind: vllm, devices: '1'}` with `broadcast`, or with `lora_nccl` and an adapter.
- **One node**: `torchrun --nproc-per-node N` for the ranks, and `engine.devices` for the engine's GPUs;
  `engine.data_parallel_size` makes several engines of them, `engine.tensor_parallel_size` larger ones. Without
  `engine.devices` the engine is on the ranks' own GPUs and sleeps while they train
  ([how](quickstart-by-mode.md#trainer-and-engine-on-the-same-gpus)): for models whose training takes all GPUs, and
  where one side would wait for the other anyway; on GPUs of its own the engine generates meanwhile.
- **Several nodes**: `lachesis run CONFIG` on a Ray cluster ([below](#on-a-ray-cluster)), which brings a lost engine up
  on another node; `lachesis cluster slurm CONFIG` prints a job ([below](#several-nodes)); or the ranks by torchrun over
  them, and the engines as servers (`engine: {kind: http, urls: [...]}`). Where a node's cards hold the model,
  `distributed.shard_size` of as many ranks as a node has keeps the gathering of weights within it (HSDP).
- **Sequences that no card takes**: `distributed.context_parallel_size` has several ranks share each micro-batch's
  tokens, and its activations ([how](quickstart-by-mode.md#training-on-several-gpus)); `lachesis plan` counts both.
- **Layers that are too large gathered**, or more GPUs than a batch has micro-batches:
  `distributed.tensor_parallel_size` has several ranks of a node share the matrices of each layer. FSDP alone sends
  weights, which takes as long for a small micro-batch as for a large one; a tensor group sends activations, as many as
  the micro-batch has tokens.
- **A mixture of experts**: `distributed.expert_parallel_size` has several ranks share the experts of each layer, to
  which tokens travel, so that a rank gathers and computes a part of them. Within a node, as far as that does; sharding
  goes on over the groups. The [last table](#experts-shared-out) counts it.

## Several nodes

The configuration is the one of a single machine; which node does what is derived from it. The
[tutorial](tutorials/cluster.md) goes through it on a CPU.

```bash
lachesis cluster slurm config.yaml --nodes 4 --gpus-per-node 8 --time 24:00:00 > job.sh
sbatch job.sh
```

- **Who does what.** The servers of `engine.kind: vllm` get the last nodes, as many as `engine.data_parallel_size` of
  `engine.tensor_parallel_size` GPUs take, on the ports from `engine.port` on; the other nodes train, with a rank for
  each GPU. On one node the run starts its engine itself, on the GPUs of `engine.devices`. With environments the ranks
  run `lachesis run`, and the rollout API and the environment of `services` are on the node of rank 0. What does not go
  together (one copy of the weights on two nodes, an engine larger than a node) is refused before anything is printed.
  A job of slurm has its nodes for itself (`--exclusive`).
- **Before it starts** `lachesis cluster preflight` says within 30 s (`--preflight`; 0 leaves it out) what does not fit,
  naming the node: nodes that do not come, other versions of Python, torch, transformers, vLLM or Lachesis than on the
  node of rank 0, too few GPUs, ports of engines that are taken or not reached, an all-reduce over the ranks that fails,
  a run directory that cannot be written, has too little room for the checkpoints of `lachesis plan` or is not shared
  where it has to be, and clocks that are apart. By itself it looks at the node where it is started.
- **Secrets** of ranks and engines are drawn when the job starts; the file has none.
- **When something fails.** A server that ends is started again on its node, and the ranks go on with the others
  meanwhile; without others the run ends. Where it does, a rank is killed or a deadline passes, the job is queued again,
  three times (`--restarts`), and goes on from the last checkpoint: set `checkpoint.every_steps`. 300 s (`--notice`)
  before the time limit the run is asked to stop with a checkpoint, and is queued again as often as it takes. slurm
  cannot bring an engine up on another node.
- **Logs** of the engines are in `runs/NAME-slurm/JOB/`, those of the run itself in `runs/NAME/logs/`. They
  are separate, because engines and preflight start before the run directory exists. `lachesis status runs/NAME`
  says how the run stands.
- The run directory, the configuration, Python and its packages have to be on a disk that all nodes share.

`lachesis cluster kubernetes` prints manifests of the same: an indexed Job with a pod for each node of ranks, a
StatefulSet with a pod for each engine, headless Services, the configuration as a ConfigMap, and a Secret with two
tokens (`--secret NAME` takes one that is there, so that the text has none). It takes Kubernetes 1.29 or newer.
Ranks are a Job, for they end: a StatefulSet starts a pod again whatever it ended with, also with success, and has no
end. An indexed Job gives each pod its number as a StatefulSet does, counts restarts for each of them, leaves a drained
node out of the count, and fails at once with an error that would come again.

```bash
lachesis cluster kubernetes config.yaml --nodes 4 --gpus-per-node 8 --image registry/lachesis:1 --claim data \\
    --set run.dir=/shared/runs > run.yaml
kubectl apply -f run.yaml
```

The claim is of a volume that all pods write to, at `/shared` (`--mount`); `run.dir` has to be below, and files that the
configuration names by their paths have to be there, or in the image. A pod that fails is replaced, three times
(`--restarts`), on another node where need be, and the run goes on from its last checkpoint; with an error that would
come again, as one of the configuration, the Job fails at once. Once it is complete, `kubectl delete -f run.yaml` takes
the engines away.

None of this has run on a real cluster: tests run slurm's file with an `srun` that starts two ranks and an engine as
processes of one machine, which pass the preflight and train, and hold the manifests against the published schema of
Kubernetes' API.

### On a Ray cluster

With `pip install 'lachesis[ray]'` on all nodes, from one of them (`ray job submit` does that from elsewhere):

```bash
RAY_ADDRESS=10.0.0.1:6379 lachesis run config.yaml
```

`lachesis run` takes Ray where RAY_ADDRESS is set, or with `cluster.kind: ray`, for any configuration;
`cluster.kind: local` keeps it away. The keys are in [`cluster`](configuration.md#cluster).

- **Who does what** is derived as above, from the nodes that Ray has; `cluster.nodes` takes fewer. The ranks have a
  placement group with a bundle for each node, each engine has one of its own, away from the others while there is
  room, and rollout API and environment are actors of their own. Ray places and watches, no more: what runs is
  `lachesis train` with torchrun's environment and `lachesis vllm-serve`, and the trainer finds its engines by a file of
  addresses that is written anew when one moves.
- **Before it starts** the same preflight looks at all nodes (`cluster.preflight_s`).
- **When something fails.** An engine that is lost with its node comes up on another one as soon as there is room, while
  the others go on; it gets requests once it has the weights, proved. Where a rank or its node is lost, all ranks are
  started again from the last checkpoint, on other nodes where need be (`cluster.wait_s`): set `checkpoint.every_steps`.
  A process that fails is started again three times (`cluster.restarts`; a lost node does not count), but an error
  that would come again, as one of the configuration, ends the run at once with its message. The loss of Ray's head, or
  of the process that was started by hand, ends the run; `--resume` goes on. With environments the ranks are started
  again when an engine is lost, too: environments that were told of it would wait.
- **Logs** of all processes are in `runs/NAME-ray/`, beside the run directory as those of slurm; what rank 0 prints is
  shown. `lachesis status runs/NAME` says how the run stands. Ctrl-C stops it after its step, with a checkpoint.
- The run directory has to be on a disk that all nodes share. Processes have the environment of Ray's on their node, and
  the variables that `cluster.environment` names.
- Whoever reaches Ray's ports can run programs there: `RAY_AUTH_MODE=token` asks for a token.

`lachesis cluster slurm config.yaml --ray ...` prints a job whose nodes make the Ray cluster (`ray symmetric-run`), and
which goes on where a node is lost, unless it is the first.
`lachesis cluster kubernetes config.yaml --ray ...` prints a `RayJob` of KubeRay (1.5.1 or newer, for `authOptions`; the
image needs `ray[default]`): a pod for each node, which KubeRay replaces, and a head that places.

A test trains with two ranks and two engines on three simulated nodes of one machine, of which one is lost; the groups
trained, and the rewards, are those of an undisturbed run. It has run on no real cluster, and on no GPU. slurm's file
is run by a test with a program in the place of `ray`; tests hold the RayJob against the fields of KubeRay 1.7's schema,
and what it has of Kubernetes' own API against that.

## Loading and saving

- **Loading.** A rank that shards a model reads its own rows of the safetensors files, a window at a time, and does not
  have the model whole: its host memory grows by its share and what a window takes (a test measures the peak). Where
  files have other tensors than the model, with `model.matmul_dtype` or without safetensors files, each rank loads the
  whole model, and the log says so.
- **Checkpoints.** Each rank writes its own part, by torch.distributed.checkpoint, into one directory that is renamed
  when all of it is on disk and its checksums are noted; so `run.dir` has to be on a disk that all nodes share, which is
  looked at when the run begins. Any number of ranks goes on from it, or one process, and `lachesis export` makes a
  model of it. `checkpoint.format: whole` has rank 0 gather and write it, which needs no shared disk and as much host
  memory there as the checkpoint has bytes.
- **Beside training.** With `checkpoint.asynchronous` training is held up for a copy to host memory alone, also on one
  GPU. `checkpoint_time` is how long it was held up, `checkpoint_write_time` how long writing took after it. One is
  written at a time: where the next is due before, training waits. The end of the run waits for the last. A kill in the
  midst of it leaves the checkpoint before. Batches of a rollout API are acknowledged, and kept rollouts let go, once it
  is written. The copy takes pinned memory, in powers of two a tensor: up to twice the bytes, and they stay with the
  process. Taking that memory of the machine can be many times as long as the copy
  ([measured](../benchmarks/RESULTS.md#what-a-checkpoint-of-8b-copies)), so a thread begins it after the first step.
- **The final model** of ranks that shard is written as it is gathered, in files of at most 512 MiB with their index, as
  transformers names them.

## What has run, and what is calculated

One, two and four GPUs of one host have run. On two: sharded training over both, and trainer and engine on one each,
with the transfer between them measured ([results](../benchmarks/RESULTS.md)), and both sides on both in turn
([measured](../benchmarks/RESULTS.md#two-gpus-train-and-generate-in-turn)). On four: layouts of four ranks over NCCL,
with small models, and two ranks that send to engines on the two others
([measured](../benchmarks/RESULTS.md#two-gpus-train-and-two-generate)). On one: a mixture of 30 billion parameters
under an adapter, beside vLLM ([measured](../benchmarks/RESULTS.md#a-mixture-of-experts-of-30-billion-parameters)). More
ranks have run with small models on a CPU
over gloo, dense and a mixture of experts: the tests hold two replicas of two shards, contexts of two and of four ranks,
two replicas of contexts of two, and tensor groups of two, sharded and not, against one process (metrics, gradients and
weights to 1e-9 in float64), and `make layouts` up
to eight ranks (replicate 2 x shard 2 x context 2, or x tensor 2; shard 2 x context 2 x tensor 2), and what a layer
keeps on each rank of a context, a tensor or an expert group against what `plan` counts. So have experts been shared out
by two ranks, and in `make layouts` by up to eight, also beside all of these. Several nodes have not run at all. All
tables of this page are **calculated**: from the shapes of the models, from the counts of memory that are held against
[measured steps](gpu-guide.md) of one GPU, and from these constants:

| constant | value | where from |
|---|---|---|
"""

AFTER_CONSTANTS = """
The tables are for all weights trained by AdamW, `model.gradient_checkpointing`, sequences and micro-batches of 8,192
tokens, in bfloat16; the last column is for LoRA on all linear layers. Half of the GPUs train and half generate, or
three quarters train where that is too large. Weights are gathered by up to 8 ranks, a share by each, and sent by them
at the same time; each rank reads its own rows of the model into its node's memory, and writes its own part of a
checkpoint. "Held up" is with
`checkpoint.asynchronous`. An engine is too large where it leaves less than a fifth of its share for its cache.
"""


def constants() -> Iterator[str]:
    """Rows of the constants."""
    rows = (
        (
            "a rank sending within a node",
            cost.SEND_WITHIN_NODE,
            "measured: 8B between two H100s over NVLink, a window of four buckets",
        ),
        ("a rank sending between nodes", cost.SEND_BETWEEN_NODES, "calculated: 400 Gbit/s, used as NVLink was"),
        ("taking in within a node", cost.TAKE_WITHIN_NODE, "measured: 8B from three H200s to a fourth over NVLink"),
        ("gathering within a node", cost.GATHER_WITHIN_NODE, "assumed"),
        ("gathering between nodes", cost.GATHER_BETWEEN_NODES, "assumed"),
        ("writing a checkpoint, a node", cost.WRITE_BYTES_S, "assumed: as much as a local NVMe disk takes"),
        ("reading a model, a node", cost.READ_BYTES_S, "assumed: the same"),
        (
            "copying a checkpoint, a GPU",
            cost.COPY_BYTES_S,
            "measured: 57 GB each of two H100s, to pinned memory that is there",
        ),
    )
    for name, rate, source in rows:
        yield f"| {name} | {rate / cost.GB:g} GB/s | {source} |"


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
        "bridge": {"kind": "lora_nccl"} if lora else {"kind": "broadcast", "senders": 8},
        "adapter": {"kind": "lora"} if lora else {"kind": "none"},
        "distributed": dict(shared),
    }
    return scale(LachesisConfig.model_validate(data), gpus=gpus, nodes=nodes, card_gb=card, found=model)


def table(card: int) -> Iterator[str]:
    """Rows for one size of cards."""
    yield f"\n## Cards of {card} GB\n"
    columns = ("model", "GPUs (nodes)", "train + generate", "engines", "a rank", "transfer", "checkpoint, held up")
    yield f"| {' | '.join(columns)} | loading, a node's memory | with LoRA: a rank |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, model in MODELS.items():
        found = find_shape(model)
        assert found is not None, model
        for gpus, nodes in CLUSTERS:
            full, lora = (planned(found, gpus=gpus, nodes=nodes, card=card, lora=kind) for kind in (False, True))
            yield " | ".join(("| " + name, f"{gpus} ({nodes})", *cells(full), rank(lora) + " |"))


def shared_out() -> Iterator[str]:
    """Rows of a mixture whose ranks share its experts, and matrices too."""
    found = find_shape(MODELS[MIXTURE])
    assert found is not None
    rows = [[planned(found, gpus=512, nodes=64, card=card, shared=sizes) for card in CARDS] for sizes in SHARED]
    yield f"\n## Experts shared out\n\nOf {MIXTURE} on 512 GPUs (64 nodes), all weights trained: memory of a rank.\n"
    columns = [f"cards of {card} GB, {one.layout.train} ranks" for card, one in zip(CARDS, rows[0], strict=True)]
    yield f"| `expert_parallel_size` | `tensor_parallel_size` | {' | '.join(columns)} |"
    yield "|---|---|" + "---|" * len(CARDS)
    for sizes, row in zip(SHARED, rows, strict=True):
        named = [str(sizes.get(f"{kind}_parallel_size", 1)) for kind in ("expert", "tensor")]
        yield "| " + " | ".join((*named, *(f"{one.rank / cost.GB:.0f} GB" for one in row))) + " |"


def cells(found: Scale) -> Iterator[str]:
    """Of full training."""
    layout = found.layout
    yield f"{layout.train} + {layout.generate}"
    yield f"{layout.engines} x TP{layout.tensor_parallel}"
    yield rank(found)
    yield f"{found.transfer_s:.2f} s"
    yield f"{found.checkpoint / cost.GB:,.0f} GB, {duration(found.checkpoint_s)}, {found.copy_s:.1f} s"
    yield f"{duration(found.load_s)}, {found.host / cost.GB:,.0f} GB"


def rank(found: Scale) -> str:
    """Memory of a rank, and whether it is there."""
    size = f"{found.rank / cost.GB:.0f} GB"
    if found.rank > found.card:
        return f"{size}: too large"
    return size if found.fits else f"{size}; an engine is too large"


def duration(seconds: float) -> str:
    """In the unit that suits it."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def render() -> str:
    """The whole page."""
    lines = [*constants(), AFTER_CONSTANTS.rstrip(), *(line for card in CARDS for line in table(card)), *shared_out()]
    return INTRODUCTION + "\n".join(lines) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render())
