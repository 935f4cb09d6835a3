"""What several ranks train is what one process trains. Run by torchrun; the tests around it start it.

    torchrun --nproc-per-node 2 -m tests.ranks_program [--device cuda] [CASE ...]

Each case trains tiny models in float64 for a few steps, by this process alone and by all ranks, and compares metrics,
canary, gradients, weights and states; then each of the two goes on from the other's state.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves, tree_map

from lachesis.bridges.broadcast import BroadcastBridge, full_source, travelling
from lachesis.bridges.external import Servers
from lachesis.bridges.senders import SenderRanks
from lachesis.bridges.sent_weights import as_saved, full_digests, full_weights, tensor_list
from lachesis.common.deadline import Deadline
from lachesis.common.errors import EngineError
from lachesis.common.world import find_world
from lachesis.config.schema import DistributedConfig, LoraAdapterConfig, OptimizerConfig
from lachesis.engines.embedded.adapters import is_adapted
from lachesis.engines.serving.backend import TransferKind
from lachesis.metrics.names import TRAINING_OF
from lachesis.metrics.values import reduce_metrics
from lachesis.train.batch import Batch, MicroBatch, pack
from lachesis.train.checkpoint import CheckpointManager
from lachesis.train.distributed.control import (
    ControlGroup,
    abort_collectives,
    destroying_process_group,
    init_process_group,
    rank_device,
)
from lachesis.train.distributed.follower import Follower, FollowingPolicy
from lachesis.train.distributed.fsdp2 import Fsdp2
from lachesis.train.distributed.job import join_job
from lachesis.train.distributed.leader import BUILD, Leader, LeadingPolicy
from lachesis.train.distributed.sharded_checkpoint import sharded_as
from lachesis.train.distributed.strategy import Replicate, SingleDevice, Strategy
from lachesis.train.model.activations import keep_activations
from lachesis.train.model.loading import LoadedModel
from lachesis.train.model.lora import add_lora
from lachesis.train.optim.sharding import build_sharded_optimizer
from lachesis.train.policy import Policy
from lachesis.train.resume import RunCheckpoints
from lachesis.transport.channel import Channel
from lachesis.transport.layout import num_bytes
from lachesis.transport.rendezvous import listen
from lachesis.transport.transports import Partners, SharedRoom
from tests.losses import loss_options
from tests.tiny import tiny_model, tiny_tokenizer
from tests.unit.bridges.fake_engine import FakeHttpEngine, FakeServer
from tests.unit.train.drifted import drifted_groups, used

LIMIT_S = 120.0
CANARY = [5, 9, 13, 20, 7]
# Some of the tiny models' tensors are larger than a buffer, and some share one.
SEVERAL = {"buffer_elements": 2000}


@dataclass(frozen=True, slots=True)
class Case:
    """A policy, and how near the ranks' numbers have to be to those of one process."""

    loss: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    lora: bool = False
    dtype: str = "float64"
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    distributed: Mapping[str, Any] = field(default_factory=dict)
    checkpointing: bool = False
    selective: bool = False
    compile: bool = False
    packing: str = "auto"
    uses: int = 1
    tolerance: float = 1e-9


EMA = {"kl_reference": "ema", "ref_mixup_alpha": 0.3, "ref_sync_steps": 1}
MOE = {"architecture": "qwen3_moe", "output_router_logits": True}
GROUPED = {"experts_implementation": "grouped_mm"}
CONTEXT = {"context_parallel_size": 2}
EXPERT = {"expert_parallel_size": 2}
BF16 = {"dtype": "bfloat16", "tolerance": 0.05}
UNCLIPPED = {"epsilon": 0.999, "epsilon_high": 9.0}
CASES: dict[str, Case] = {
    "full": Case(),
    "tied": Case(model={"tie_word_embeddings": True}, loss={"beta": 0.1, "kl_target": 1e-4, "kl_horizon": 40}),
    "ema": Case(loss={"beta": 0.1, **EMA}),
    "lora": Case(lora=True, loss={"beta": 0.1}),
    "lora_ema": Case(lora=True, loss={"beta": 0.1, **EMA}, checkpointing=True),
    "entropy": Case(loss={"top_entropy_quantile": 0.4, "entropy_coef": 0.01}),
    "uses": Case(uses=2, loss={"loss_type": "dapo"}),
    "gathered": Case(distributed={"reshard_after_forward": False}, checkpointing=True, loss={"beta": 0.1}),
    "padded": Case(model={"architecture": "bloom"}, packing="padded"),
    "softcap": Case(model={"architecture": "gemma2"}),
    "groups_of_one": Case(distributed={"shard_size": 1}),
    "moe": Case(model=MOE),
    "replicate": Case(distributed={"strategy": "replicate"}, loss={"beta": 0.1, **EMA}, uses=2),
    "replicate_lora": Case(distributed={"strategy": "replicate"}, lora=True, optimizer={"kind": "adafactor"}),
    "context": Case(distributed=CONTEXT, loss={"beta": 0.1, **EMA}, uses=2),
    # What a loss needs of whole rows and of all tokens, over windows of attention.
    "context_rows": Case(
        distributed=CONTEXT,
        loss={"importance_sampling_level": "sequence", "top_entropy_quantile": 0.4, "entropy_coef": 0.01},
        checkpointing=True,
        model={"architecture": "mistral"},
    ),
    "context_moe": Case(distributed=CONTEXT, model=MOE, lora=True),
    "expert": Case(distributed=EXPERT, model=MOE, loss={"beta": 0.1, **EMA}),
    "expert_lora": Case(distributed=EXPERT, model=MOE, lora=True, checkpointing=True),
    "masters": Case(**BF16),
    # Each rank draws its own rounding: without clipping, at whose edge the last bit of a ratio decides.
    "stochastic": Case(**BF16, optimizer={"weight_update": "stochastic_rounding"}, loss=UNCLIPPED),
}
# Of four ranks.
LAYOUTS: dict[str, Case] = {
    "hsdp": Case(distributed={"shard_size": 2}, loss={"beta": 0.1, **EMA}),
    # More ranks than heads of keys and values, and than some micro-batches have tokens.
    "context_of_four": Case(distributed={"context_parallel_size": 4}, checkpointing=True),
    "hsdp_context_moe": Case(distributed={**CONTEXT, "replicate_size": 2}, model=MOE),
    "shard_expert": Case(distributed=EXPERT, model=MOE | {"num_experts": 6}, loss={"beta": 0.1, **EMA}),
}
# Beside what the tests run, by number of ranks: `python -m tests.layouts`.
FLOAT32 = {"dtype": "float32", "tolerance": 1e-6}
TEACHER = {"kind": "model", "model": "tiny"}
MORE: dict[int, dict[str, Case]] = {
    2: {
        "context_replicate": Case(distributed={**CONTEXT, "strategy": "replicate"}, loss={"beta": 0.1, **EMA}),
        "context_lora": Case(distributed={**CONTEXT, "strategy": "replicate"}, lora=True, loss={"beta": 0.1}),
        "context_model_head": Case(distributed=CONTEXT, model={"architecture": "granite"}),
        "context_tied": Case(distributed=CONTEXT, model={"tie_word_embeddings": True}),
        "context_teacher": Case(distributed=CONTEXT, loss={"teacher": TEACHER}),
        "context_top_k": Case(distributed=CONTEXT, loss={"teacher": {**TEACHER, "top_k": 5}}),
        "context_float32": Case(**FLOAT32, distributed=CONTEXT),
        "context_moe_float32": Case(**FLOAT32, distributed=CONTEXT, model=MOE),
        "context_compiled": Case(**FLOAT32, distributed=CONTEXT, compile=True),
        "context_selective": Case(distributed=CONTEXT, selective=True),
        "context_gathered": Case(distributed={**CONTEXT, "reshard_after_forward": False}),
        "context_bf16": Case(**BF16, distributed=CONTEXT, checkpointing=True),
        "expert_float32": Case(**FLOAT32, distributed=EXPERT, model=MOE | GROUPED),
        "expert_dense": Case(distributed=EXPERT, model=MOE | {"mlp_only_layers": [0], "tie_word_embeddings": True}),
        "expert_context": Case(distributed={**CONTEXT, **EXPERT}, model=MOE, uses=2),
        "expert_replay": Case(distributed=EXPERT, model=MOE, loss={"router_replay": True}),
        "expert_compiled": Case(**FLOAT32, distributed=EXPERT, model=MOE, compile=True),
        "expert_bf16": Case(**BF16, distributed=EXPERT, model=MOE | GROUPED, checkpointing=True),
        "fsdp_float32": Case(**FLOAT32),
        "fsdp_moe_float32": Case(**FLOAT32, model=MOE),
    },
    4: {
        "fsdp_of_four": Case(loss={"beta": 0.1, **EMA}),
        "hsdp_moe": Case(distributed={"replicate_size": 2}, model=MOE, uses=2),
        "shard_context": Case(distributed={**CONTEXT, "shard_size": 2}, loss={"beta": 0.1, **EMA}, uses=2),
        "replicate_context": Case(distributed={**CONTEXT, "strategy": "replicate"}),
        "hsdp_float32": Case(**FLOAT32, distributed={"shard_size": 2}),
        "hsdp_moe_float32": Case(**FLOAT32, distributed={"replicate_size": 2}, model=MOE),
        "expert_of_four": Case(distributed={"expert_parallel_size": 4}, model=MOE),
        "replicate_expert": Case(distributed={**EXPERT, "replicate_size": 2}, model=MOE, checkpointing=True),
        "context_expert_of_four": Case(distributed={**CONTEXT, "expert_parallel_size": 4}, model=MOE, lora=True),
    },
    8: {
        "replicate_shard_context": Case(distributed={**CONTEXT, "shard_size": 2}, loss={"beta": 0.1, **EMA}),
        "replicate_shard_context_moe": Case(distributed={**CONTEXT, "replicate_size": 2}, model=MOE),
        "hsdp_of_eight": Case(distributed={"shard_size": 4}),
        "replicate_shard_expert": Case(distributed={**EXPERT, "replicate_size": 2}, model=MOE),
        "shard_context_expert": Case(distributed={**CONTEXT, **EXPERT}, model=MOE, loss={"beta": 0.1}),
        "expert_of_eight": Case(distributed={"expert_parallel_size": 8}, model=MOE | {"num_experts": 8}),
    },
}
GPU_CASES: dict[str, Case] = {
    "flash": Case(**BF16, loss={"beta": 0.1}),
    "flash_lora": Case(**BF16, lora=True, checkpointing=True, loss={"beta": 0.1}),
    "compiled": Case(**BF16, compile=True),
    "offload": Case(distributed={"cpu_offload": True}, loss={"beta": 0.1, **EMA}),
    "cpu_optimizer": Case(**BF16, optimizer={"kind": "adamw_cpu"}),
}
# Those whose states differ in what ranks write of them.
IN_PARTS = (
    *("ema", "lora_ema", "uses", "groups_of_one", "masters", "stochastic", "offload", "cpu_optimizer"),
    *("fsdp_of_four", "hsdp", "hsdp_moe", "hsdp_context_moe", "shard_context", "replicate_shard_context"),
    *("expert", "shard_expert", "replicate_shard_expert"),
)

# Those whose ranks add up gradients over replicas, and nothing else in the midst of a step.
REPLICAS = ("replicate", "hsdp", "hsdp_float32", "hsdp_of_eight")

# Those whose weights all ranks send: dense, tied, merged, experts, sharded in one way or another or not at all.
SENT = (
    *("full", "tied", "lora", "moe", "groups_of_one", "replicate", "context_moe", "masters"),
    *("expert", "expert_lora", "shard_expert"),
    *("fsdp_of_four", "hsdp", "hsdp_moe", "hsdp_context_moe", "shard_context", "replicate_shard_context_moe"),
)


class NotesGradients(Strategy):
    """Keeps what the optimizer is about to get: the gradients of a step, whole on rank 0."""

    gradients: Sequence[torch.Tensor] = ()

    def sum_gradients(self, parameters: Sequence[Parameter]) -> None:
        super().sum_gradients(parameters)
        self.gradients = [tensor.cpu().clone() for tensor in self.gather([gradient_of(p) for p in parameters])]


class NotingAlone(NotesGradients, SingleDevice):
    pass


class NotingReplicate(NotesGradients, Replicate):
    pass


class NotingFsdp2(NotesGradients, Fsdp2):
    pass


@torch.no_grad()
def gradient_of(parameter: Parameter) -> torch.Tensor:
    """Zeros where a pass has left none: other ranks may have one."""
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
    return sharded_as(parameter, gradient.to_local()) if isinstance(gradient, DTensor) else gradient


def same_bits_again(*, name: str) -> None:
    """Cases that repeat a step bit by bit need kernels that always add in one order. On a CPU they do."""
    torch.use_deterministic_algorithms(name in IN_PARTS, warn_only=True)


def build(case: Case, strategy: Strategy, *, device: torch.device, make: Any = Policy) -> Policy:
    """The case's policy, the same on all ranks."""
    model = dict(case.model)
    dtype = getattr(torch, case.dtype)
    transformer = tiny_model(model.pop("architecture", "qwen2"), **model).to(dtype)
    torch.manual_seed(0)
    if case.checkpointing:
        transformer.gradient_checkpointing_enable({"use_reentrant": False})
    if case.selective:
        keep_activations(transformer, "selective")
    if not strategy.sharded:
        transformer.to(device)
    adapted = add_lora(transformer, LoraAdapterConfig(r=4)).to(dtype) if case.lora else transformer
    return make(
        LoadedModel(model=adapted, transformer=transformer, tokenizer=tiny_tokenizer()),
        strategy=strategy,
        optimizer_builder=partial(
            build_sharded_optimizer,
            # As SGD: with AdamW's division a gradient of rounding noise would become a step of full size.
            config=OptimizerConfig(**{"eps": 1.0, "max_grad_norm": 0.5} | dict(case.optimizer)),
            strategy=strategy,
            learning_rate=1e-2,
            total_steps=10,
        ),
        options=loss_options(**case.loss),
        packing=case.packing,
        compile_layers=case.compile,
        teachers={"": tiny_model(seed=1).to(dtype).requires_grad_(False)} if "teacher" in case.loss else None,
    )


def in_float64(model: Mapping[str, Any]) -> dict[str, Any]:
    """Grouped products of experts are of no float64."""
    return {name: value for name, value in model.items() if name != "experts_implementation"}


def batches(case: Case, *, packed: bool) -> list[Batch]:
    """Ragged ones: of micro-batches that no number of ranks divides, and one with a single micro-batch."""
    source = tiny_model(**{"architecture": "qwen2"} | in_float64(case.model)).double()
    sizes = [(3, 30), (2, 1 << 20), (4, 25)]
    made = []
    for seed, (groups, max_tokens) in enumerate(sizes):
        batch = pack(drifted_groups(source, groups=groups, seed=seed), max_tokens=max_tokens, share_prefixes=packed)
        if case.loss.get("router_replay"):
            batch = routed(batch, source, seed=seed)
        made += [used(batch, use, of=case.uses) for use in range(case.uses)]
    return made


def routed(batch: Batch, model: Any, *, seed: int) -> Batch:
    """With any experts for each token, as an engine might have chosen them."""
    config, drawn = model.config, torch.Generator().manual_seed(seed)

    def chosen(micro: MicroBatch) -> torch.Tensor:
        liking = torch.rand(micro.num_inputs, config.num_hidden_layers, config.num_experts, generator=drawn)
        return liking.topk(config.num_experts_per_tok).indices.short()

    return replace(batch, micro_batches=tuple(replace(micro, routed=chosen(micro)) for micro in batch.micro_batches))


def compare(case: Case, leader: Leader, *, name: str, device: torch.device, join_backend: Any) -> None:
    same_bits_again(name=name)
    alone = build(case, NotingAlone(), device=device)
    with leader.turn(BUILD, {"case": name}, what="building the policy"):
        leading = build(case, join_backend(case), device=device, make=partial(LeadingPolicy, leader=leader))
    assert leading.plan == alone.plan, (leading.plan, alone.plan)
    todo = batches(case, packed=alone.plan.packed)
    if leading.plan.context is not None:
        assert_tokens_shared(leading, todo[0])
    before = {key: value.clone() for key, value in alone.weights().items()}
    for batch in todo[:-1]:
        step(alone, leading, batch, case)
    moved = max(float((value - before[key]).abs().max()) for key, value in alone.weights().items())
    assert moved > 1e-6, "nothing moved: the comparison would be empty"
    # Each goes on from the other's state: a checkpoint fits any number of ranks.
    states = [snapshot(policy) for policy in (alone, leading)]
    for policy, (weights, optimizer, rest) in zip((leading, alone), states, strict=True):
        policy.load_weights(weights)
        policy.load_optimizer_state(optimizer)
        policy.load_state_dict(rest)
    assert alone.optimizer.steps_taken == leading.optimizer.steps_taken == len(todo) - 1
    step(alone, leading, todo[-1], case)
    if name in IN_PARTS:
        exchange_parts(alone, leading, todo[0])
        step(alone, leading, todo[0], case)
    if name in REPLICAS:
        groups = drifted_groups(tiny_model("qwen2").double(), groups=6, seed=0)
        once, often = (pack(groups, max_tokens=most, share_prefixes=True) for most in (1 << 20, 10))
        assert len(often.micro_batches) > leading.strategy.world_size, "some ranks have several passes"
        assert all_reduces(leading, batch=often) == all_reduces(leading, batch=once)
    if leading.options.kl_target is not None:
        groups = drifted_groups(tiny_model("qwen2").double(), groups=3, seed=1)
        torch.testing.assert_close(leading.divergences(groups), alone.divergences(groups))
    prove(leading, leader)
    gather(leading, leader)
    if device.type == "cpu":  # a process cannot map memory of its own GPU from outside
        pack_for_workers(leading)
    if name in SENT:
        send(leading)
    if name == SENT[0]:
        send_to_one_that_hangs(leading)


def all_reduces(policy: Policy, *, batch: Batch) -> int:
    """How many there are before the update of a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        policy.accumulate(batch)
    policy.step()
    found = sum(event.name == "c10d::allreduce_" for event in profile.events() or ())
    assert found, "this looks for them by another name than torch's"
    return found


def assert_tokens_shared(policy: Policy, batch: Batch) -> None:
    """Of each micro-batch that is this rank's, no more than its part of the tokens goes through the model here."""
    seen: list[int] = []
    embeddings = policy.transformer.get_input_embeddings()
    hook = embeddings.register_forward_hook(lambda module, given, output: seen.append(output.shape[1]))
    policy.recompute_logprobs(batch)
    hook.remove()
    mesh = policy.strategy.mesh
    sizes = [-(-micro.num_inputs // mesh.context) for micro in batch.micro_batches[:: mesh.parts]]
    assert seen == sizes, (seen, sizes)
    assert max(seen) < max(micro.num_inputs for micro in batch.micro_batches)


class NoFeed:
    """What checkpoints need of a feed."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {}

    def saved(self) -> None:
        pass


def exchange_parts(alone: Policy, leading: Policy, batch: Batch) -> None:
    """Ranks write their parts, and go on from them bit by bit; one process goes on from them, and they from its own."""
    feed: Any = NoFeed()
    with tempfile.TemporaryDirectory() as directory:
        for first, second, asynchronous in ((leading, leading, True), (leading, alone, False), (alone, leading, True)):
            manager = CheckpointManager(Path(directory), keep_last=1)
            options = {"feed": feed, "every_steps": 1, "asynchronous": asynchronous}
            saving = RunCheckpoints(manager, policy=first, **options)
            saving.require_shared_disk()
            saving.maybe_save(1)
            saving.wait()
            before = snapshot(first)
            after = learned(first, batch) if first is second else None
            scatter(second)
            RunCheckpoints(manager, policy=second, **options).restore()
            assert_same(snapshot(second), before)
            if after is not None:
                assert_same(learned(second, batch), after)
                RunCheckpoints(manager, policy=second, **options).restore()


def learned(policy: Policy, batch: Batch) -> Any:
    """What a step more makes of it."""
    policy.accumulate(batch)
    policy.step()
    return snapshot(policy)


def scatter(policy: Policy) -> None:
    """Weights that nobody has learned, so that it matters what is read."""
    policy.load_weights({name: torch.randn_like(tensor) for name, tensor in policy.weights().items()})


def assert_same(found: Any, expected: Any) -> None:
    """Bit by bit. How many slots ranks need for old logprobs, of which some are of idle passes, is their affair."""
    found, expected = ([leaf for leaf in tree_leaves(state) if not_empty(leaf)] for state in (found, expected))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        assert same, (one, other)


def not_empty(leaf: Any) -> bool:
    return not isinstance(leaf, torch.Tensor) or leaf.numel() > 0


def prove(policy: Policy, leader: Leader) -> None:
    """Digests are those of the whole weights, and take one turn, in which nothing is gathered."""
    before = leader.turns
    found = policy.weight_digests()
    if policy.strategy.sharded and not is_adapted(policy.model):
        assert leader.turns - before == 1
    assert found == full_digests(policy.model, whole=policy.whole)


def gather(policy: Policy, leader: Leader) -> None:
    """All parameters are one turn, also where the caller takes the first and lets go of the others."""
    parameters = [*policy.model.parameters()]
    before = leader.turns
    first = next(policy.whole(parameters)).clone()
    rest = [*policy.whole(parameters)]
    assert torch.equal(first, rest[0])
    assert [tensor.shape for tensor in rest] == [parameter.shape for parameter in parameters]
    assert leader.turns - before == (2 if policy.strategy.sharded else 0)


def pack_for_workers(policy: LeadingPolicy) -> None:
    """The worker beside each rank reads what that one packs; ranks go on where one dies in the midst of an update."""
    for kind in ("lora", "full") if is_adapted(policy.model) else ("full",):
        pack_kind_for_workers(policy, kind)


def pack_kind_for_workers(policy: LeadingPolicy, kind: TransferKind) -> None:
    expected = {name: tensor.clone() for name, tensor in travelling(kind, policy.whole).tensors(policy, True)}
    specs, size = tensor_list(expected), policy.strategy.world_size
    largest = max(map(num_bytes, specs))
    rendezvous = listen("tcp://127.0.0.1:0")
    options: dict[str, Any] = {
        "init_method": rendezvous.init_method, "world_size": 1 + size, "backend": "ipc", "device": "cpu",
        "deadline": Deadline("meeting", LIMIT_S),
    }  # fmt: skip

    def take(worker: Channel) -> dict[str, torch.Tensor]:
        with worker.receive(specs, deadline=Deadline("an update", LIMIT_S)) as tensors:
            return {name: tensor.clone() for name, tensor in tensors}

    with ThreadPoolExecutor(size) as pool:
        joining = [pool.submit(Channel.connect, rank=1 + rank, **options) for rank in range(size)]
        channel = Channel.connect(rank=0, rendezvous=rendezvous, **options)
        workers = [joined.result() for joined in joining]

        def update() -> None:
            def send(tensors: Iterator[tuple[str, torch.Tensor]], partners: Partners) -> None:
                deadline = Deadline("an update", LIMIT_S)
                channel.send(tensors, specs, deadline=deadline, bucket_bytes=largest, partners=partners)

            policy.pack_buckets(kind, True, largest, channel.updates == 0, send=send)

        for _ in range(2):
            taken = [pool.submit(take, worker) for worker in workers]
            update()
            for found in taken:
                assert_same(found.result(), expected)
            assert channel.read_ranks == {1 + rank: rank for rank in range(size)}
        workers[-1].close()
        taken = [pool.submit(take, worker) for worker in workers[:-1]]
        try:
            update()
        except EngineError:
            channel.close()
        else:
            raise AssertionError("a worker is gone")
        assert all(found.exception() is not None for found in taken)
        for worker in workers:
            worker.close()
    assert_same(dict(travelling(kind, policy.whole).tensors(policy, True)), expected)


def send(policy: Policy) -> None:
    """Each rank sends a share of the weights to the workers of two engines, which have all of them, bit by bit."""
    servers = [FakeServer(workers=2, engine="vllm"), FakeServer(number=1, engine="vllm")]
    with sending(policy, servers, limit_s=LIMIT_S) as bridge:
        for version in range(3):  # one dies in the second, and the other has it from all ranks again
            servers[-1].dies_in = "loading" if version == 1 else ""
            bridge.sync(version)
            expected = saved_weights(policy)
            for server in servers[: 1 if version else 2]:
                assert_same(server.tensors, expected)
            assert bridge.last_report is not None
            sent = [bridge.last_report.ranks[rank].num_bytes for rank in range(policy.strategy.world_size)]
            assert min(sent) > 0 and sum(sent) >= sum(tensor.nbytes for tensor in expected.values()), sent


def send_to_one_that_hangs(policy: Policy) -> None:
    """No rank waits longer than the transfer may take, the other has the weights then, and next time both have."""
    servers = [FakeServer(workers=2, engine="vllm"), FakeServer(number=1, engine="vllm")]
    with sending(policy, servers, limit_s=2.5) as bridge:
        bridge.sync(0)
        servers[0].goes_on.clear()
        began = time.monotonic()
        bridge.sync(1)
        assert time.monotonic() - began < 25.0
        assert [server.version for server in servers] == [0, 1]
        assert_same(servers[1].tensors, saved_weights(policy))
        servers[0].goes_on.set()
        bridge.sync(2)
        for server in servers:
            assert_same(server.tensors, saved_weights(policy))


def saved_weights(policy: Policy) -> dict[str, torch.Tensor]:
    whole = full_weights(policy.model, whole=policy.whole)
    return {name: tensor.cpu() for name, tensor in as_saved(policy.model, whole)}


@contextmanager
def sending(policy: Policy, servers: list[FakeServer], *, limit_s: float) -> Iterator[BroadcastBridge[Policy]]:
    """A bridge over which all ranks send."""
    engine = FakeHttpEngine(*servers)
    engine.connect(deadline=Deadline("meeting the engines", LIMIT_S))
    with tempfile.TemporaryDirectory() as directory:
        bridge: BroadcastBridge[Policy] = BroadcastBridge(
            Servers(engine=engine, proof_builder=None, sync_s=limit_s),
            source=full_source(lambda policy: policy.model, lambda policy: policy.whole),
            backend="gloo",
            device="cpu",
            directory=Path(directory),
            sender_ranks=SenderRanks(lambda policy: policy, most=8),
        )
        bridge.prepare(lambda: policy)
        yield bridge
        bridge.close()


def snapshot(policy: Policy) -> tuple[Any, Any, Any]:
    """As a checkpoint's file would have it: on the CPU, and apart from what it was taken from."""
    return tuple(copied(state) for state in (policy.weights(), policy.optimizer_state(), policy.state_dict()))


def copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, list | tuple) else value


def step(alone: Policy, leading: Policy, batch: Batch, case: Case) -> None:
    exact = partial(exact_metrics, case, snapshot(alone), batch) if case.dtype == "float32" else None
    expected = reduce_metrics(alone.accumulate(batch) | alone.step())
    found = reduce_metrics(leading.accumulate(batch) | leading.step())
    times = {name for name in found if name.startswith(TRAINING_OF)}
    assert times == {f"{TRAINING_OF}{rank}" for rank in range(leading.strategy.world_size)}, times
    found = {name: value for name, value in found.items() if name not in times}
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for metric, value in expected.items():
        near = case.tolerance * max(1.0, abs(value))
        if abs(found[metric] - value) > near:
            # Both are rounded: then neither may be farther off than that, or the ranks' farther than the other's twice.
            assert exact is not None, (metric, found, expected)
            right = exact()[metric]
            errors = (abs(found[metric] - right), abs(value - right))
            assert errors[0] <= max(near, 2.0 * errors[1]), (metric, right, errors, found, expected)
    compare_gradients(alone, leading, case)
    weights, near = leading.weights(), {"rtol": case.tolerance, "atol": case.tolerance}
    for key, value in alone.weights().items():
        torch.testing.assert_close(weights[key].to(value.device), value, **near, msg=lambda m, k=key: f"{k}: {m}")
    difference = torch.tensor(alone.canary(CANARY)) - torch.tensor(leading.canary(CANARY))
    assert difference.abs().max() <= 10 * case.tolerance, difference


def exact_metrics(case: Case, state: tuple[Any, Any, Any], batch: Batch) -> dict[str, Any]:
    """Those of the step in float64, by one process, from the weights and the state that it had before."""
    case = replace(case, dtype="float64", compile=False, model=in_float64(case.model))
    policy = build(case, NotingAlone(), device=torch.device("cpu"))
    weights, optimizer, rest = tree_map(lambda leaf: leaf.double() if is_float32(leaf) else leaf, state)
    policy.load_weights(weights)
    policy.load_optimizer_state(optimizer)
    policy.load_state_dict(rest)
    return reduce_metrics(policy.accumulate(batch) | policy.step())


def is_float32(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32


def compare_gradients(alone: Policy, leading: Policy, case: Case) -> None:
    """Those that the optimizer got, before it clipped them.

    In less than float64 what is rounded has the size of the summands, and an element may be what is left of them:
    there differences are measured by the length of the gradient.
    """
    one, other = alone.strategy, leading.strategy
    assert isinstance(one, NotesGradients) and isinstance(other, NotesGradients)
    names = [name for name, parameter in alone.model.named_parameters() if parameter.requires_grad]
    length = float(torch.stack([tensor.double().norm() for tensor in one.gradients]).norm())
    scale = 1.0 if case.dtype == "float64" else max(1.0, length)
    near = {"rtol": case.tolerance, "atol": case.tolerance * scale}
    for name, expected, found in zip(names, one.gradients, other.gradients, strict=True):
        torch.testing.assert_close(found, expected, **near, msg=lambda m, n=name: f"the gradient of {n}: {m}")
    assert length > 0, "there is none: the comparison would be empty"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what same_bits_again() needs, before the first kernel
    torch.backends.cuda.matmul.allow_tf32 = False
    world = find_world(os.environ)
    assert world is not None
    device = rank_device(world, wanted=asked.device)
    known = CASES | LAYOUTS | GPU_CASES | {name: case for cases in MORE.values() for name, case in cases.items()}
    job = join_job(world, limit_s=LIMIT_S)
    control = ControlGroup(world, job.store, limit_s=LIMIT_S, secret=job.secret)

    def backend_of(case: Case) -> Strategy:
        config = DistributedConfig(**dict(case.distributed))
        replicated = config.strategy == "replicate"
        return NotingReplicate(device, config) if replicated else NotingFsdp2(device, config, **SEVERAL)

    def build_part(data: Mapping[str, Any]) -> tuple[Policy, int]:
        case = known[data["case"]]
        same_bits_again(name=data["case"])
        make = partial(FollowingPolicy, control=control, room=SharedRoom(device))
        return build(case, backend_of(case), device=device, make=make), 0

    init_process_group(world, job.store, device=device, limit_s=LIMIT_S, secret=job.secret)
    if world.rank > 0:
        with destroying_process_group():
            Follower(control, build=build_part, end_process=lambda error: os._exit(1)).follow()
        return
    leader = Leader(control, abort=abort_collectives)
    with closing(leader), destroying_process_group():
        for name in asked.cases or CASES:
            compare(known[name], leader, name=name, device=device, join_backend=backend_of)
            sys.stdout.write(f"{name}: equal over {world.size} ranks\n")
            sys.stdout.flush()
        leader.close()


if __name__ == "__main__":
    main()
