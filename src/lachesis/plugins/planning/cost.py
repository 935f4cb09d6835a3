"""Cost of a run over several GPUs and nodes: memory of a rank, of an engine's GPU and of a node, and of a checkpoint.

It is calculated: no run of these sizes was measured. It follows the implementation: each rank loads its rows, and
writes its part of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lachesis.common.errors import ConfigError
from lachesis.config.schema import OWN_GPU_UTILIZATION, LachesisConfig, VllmEngineConfig
from lachesis.engines.gpus import engine_workers
from lachesis.plan.cards import (
    CONTEXT_BYTES,
    ENGINE_WORKSPACE_BYTES,
    GB,
    PLAN_ERROR,
    TIGHT,
    CardUse,
    card_use,
    process_bytes,
)
from lachesis.plan.gpu_share import ENGINE_GRAPHS_BYTES
from lachesis.plan.memory import held_weights_bytes, weight_bytes
from lachesis.plan.plan import plan
from lachesis.plan.shapes import FoundShape, require_shape

# Engines are split over at most the GPUs of a node.
_TENSOR_PARALLEL = (1, 2, 4, 8)
# Share of an engine's memory that its cache should have.
_CACHE_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class GpuSplit:
    """Division of GPUs into training and generating ones, in engines of ``tensor_parallel`` each.

    ``generating`` is the number that generate by the configuration; if it does not say, all that do not train. They
    also train if ``shared``.
    """

    nodes: int
    per_node: int
    train: int
    tensor_parallel: int
    generating: int | None = None
    shared: bool = False

    @property
    def generate(self) -> int:
        return self.nodes * self.per_node - self.train if self.generating is None else self.generating

    @property
    def idle(self) -> int:
        """Return the number of GPUs that neither train nor generate."""
        return self.nodes * self.per_node - self.train - (0 if self.shared else self.generate)

    @property
    def engines(self) -> int:
        return self.generate // self.tensor_parallel


@dataclass(frozen=True, slots=True)
class Scale:
    """Bytes of a layout.

    ``host`` is the memory of a node that all its ranks take while they load, and ``copy`` a rank's host copy of an
    asynchronous checkpoint. ``beside`` is the use of a card that trains and generates, if the layout has one.
    """

    layout: GpuSplit
    rank: int
    engine: int
    card: int
    host: int
    checkpoint: int
    copy: int
    beside: CardUse | None = None

    @property
    def engine_fits(self) -> bool:
        return self.engine <= OWN_GPU_UTILIZATION * self.card * (1 - _CACHE_SHARE)

    @property
    def fits(self) -> bool:
        if self.layout.shared:
            return self.beside is not None and self.beside.fits
        return self.rank <= self.card and self.engine_fits

    @property
    def tight(self) -> bool:
        """True if the trainer's part fits, but not if it needs as much more as plans have been wrong."""
        if self.beside is not None:
            return self.beside.tight
        return self.rank <= self.card < (1 + PLAN_ERROR) * self.rank


def scale(
    config: LachesisConfig, *, gpus: int, nodes: int, card_gb: float, found: FoundShape | None, train: int | None = None
) -> Scale:
    """Return the cost of a layout of ``gpus`` over ``nodes``.

    Args:
        train: GPUs that train; if unset as many as the configuration leaves to the trainer, or, where it does not say
            which GPUs generate (``engine.kind`` http), half of them, or more if needed to fit.

    Raises:
        ConfigError: the GPUs do not divide evenly over the nodes, the configuration's engines and the ranks do not
            fit on them, or the model's shape is not known.
    """
    found = require_shape(config, found)
    if gpus % nodes or gpus < 2:
        raise ConfigError(
            f"{gpus} GPUs cannot form {nodes} equal nodes with a GPU to train and one to generate",
            remedy="give a multiple of the nodes, at least 2",
        )
    card = round(card_gb * GB)
    if isinstance(config.engine, VllmEngineConfig):
        layouts = [_layout_of_file(config, config.engine, gpus=gpus, nodes=nodes, train=train)]
    else:
        layouts = list(_possible_layouts(config, gpus=gpus, nodes=nodes, card=card, found=found, train=train))
    results = [_scale(config, layout, card, found) for layout in layouts]
    return next((result for result in results if result.fits), results[-1])


def _layout_of_file(
    config: LachesisConfig, engine: VllmEngineConfig, *, gpus: int, nodes: int, train: int | None
) -> GpuSplit:
    """Return the layout by a vLLM engine's keys, the same as `lachesis cluster` and a run derive.

    On one node the engine has the GPUs of ``engine.devices``; without that key it shares the ranks' GPUs if it takes
    one or all of them, and otherwise gets separate ones. Several nodes have servers on whole nodes.
    """
    workers, ways, per_node = engine_workers(engine), engine.tensor_parallel_size, gpus // nodes
    named = len(set((engine.devices or "").split(",")) - {""})
    wanted = f"engine.data_parallel_size {engine.data_parallel_size} x tensor_parallel_size {ways}"
    shared = False
    if nodes == 1:
        shared = config.shares_weights or engine.enable_sleep_mode or (named == 0 and workers in (1, train or gpus))
        taken = 0 if shared else named or workers
    else:
        if ways > per_node:
            raise ConfigError(
                f"engine.tensor_parallel_size {ways} is more than the {per_node} GPUs of a node",
                remedy="lower it, or give fewer --nodes for the same --gpus",
            )
        taken = -(-engine.data_parallel_size // (per_node // ways)) * per_node
    ranks = train if train is not None else gpus - taken
    if ranks < 1 or ranks + taken > gpus or workers > gpus:
        raise ConfigError(
            f"{wanted} takes {max(workers, taken)} of {gpus} GPUs, but {max(ranks, 1)} or more must train",
            remedy="raise --gpus, or lower engine.data_parallel_size, engine.tensor_parallel_size or --devices",
        )
    return GpuSplit(nodes, per_node, ranks, ways, generating=workers, shared=shared)


def _possible_layouts(
    config: LachesisConfig, *, gpus: int, nodes: int, card: int, found: FoundShape, train: int | None
) -> Iterator[GpuSplit]:
    """Yield layouts for a configuration that does not say which GPUs generate."""
    if train is not None and not 1 <= train < gpus:
        raise ConfigError(f"{train} of {gpus} GPUs train, which leaves none to generate", remedy="lower --devices")
    for number in (max(1, gpus // 2), gpus * 3 // 4) if train is None else [train]:
        ways = engine_ways(config, found, card, most=min(gpus - number, gpus // nodes))
        yield GpuSplit(nodes, gpus // nodes, number, ways)


def engine_ways(config: LachesisConfig, found: FoundShape, card: int, *, most: int) -> int:
    """Return the fewest GPUs that hold the weights of an engine with room for a cache, or all if none do."""
    weights = found.shape.parameters * weight_bytes(config, found.shape, device="cuda")
    room = (
        OWN_GPU_UTILIZATION * card * (1 - _CACHE_SHARE) - ENGINE_WORKSPACE_BYTES - ENGINE_GRAPHS_BYTES - CONTEXT_BYTES
    )
    possible = [ways for ways in _TENSOR_PARALLEL if ways <= most]
    return next((ways for ways in possible if weights / ways <= room), possible[-1])


def _scale(config: LachesisConfig, layout: GpuSplit, card: int, found: FoundShape) -> Scale:
    shape = found.shape
    width = weight_bytes(config, shape, device="cuda")
    planned = plan(config, device="cuda", devices=layout.train, found=found)
    assert planned.checkpoint is not None
    weights = held_weights_bytes(config, shape, width=width)
    ranks_of_a_node = min(layout.per_node, layout.train)
    in_parts = config.distributed.strategy == "shard" and config.checkpoint.format == "auto"
    copy = -(-planned.checkpoint // layout.train) if in_parts else planned.checkpoint
    return Scale(
        layout=layout,
        rank=process_bytes(planned, "trainer"),
        engine=shape.parameters * width // layout.tensor_parallel
        + ENGINE_WORKSPACE_BYTES
        + ENGINE_GRAPHS_BYTES
        + CONTEXT_BYTES,
        card=card,
        host=-(-ranks_of_a_node * weights // layout.train),
        checkpoint=planned.checkpoint,
        copy=copy,
        beside=card_use(config, planned, card_gb=card / GB) if layout.shared else None,
    )


def scale_lines(
    config: LachesisConfig, *, gpus: int, nodes: int, card_gb: float, found: FoundShape | None, train: int | None
) -> Iterator[str]:
    """Yield the cost as lines of text; arguments and errors as those of :func:`scale`."""
    answer = scale(config, gpus=gpus, nodes=nodes, card_gb=card_gb, found=found, train=train)
    layout = answer.layout
    engines = "engine" if layout.engines == 1 else "engines"
    yield f"on {nodes} x {layout.per_node} GPUs of {card_gb:g} GB, calculated (docs/scale.md)"
    shared = f"{layout.engines} {engines} of {layout.tensor_parallel}"
    idle = f", {layout.idle} idle" if layout.idle else ""
    if answer.beside is not None:
        use, fits = answer.beside, _verdict(answer.fits, answer.tight)
        yield f"  {'train, generate':<20}{layout.train} + {layout.generate} on the same GPUs, {shared}{idle}"
        parts = f"trainer {use.trainer / GB:.1f} GB, engine {use.engine / GB:.1f} GB"
        yield f"  {'a GPU of both':<20}{use.total / GB:.1f} GB: {fits} ({parts})"
    else:
        yield f"  {'train, generate':<20}{layout.train} + {layout.generate}, {shared}{idle}"
        yield f"  {'a rank':<20}{answer.rank / GB:.1f} GB: {_verdict(answer.rank <= answer.card, answer.tight)}"
        room = OWN_GPU_UTILIZATION * answer.card - answer.engine
        left = f"{room / GB:.1f} GB are left for its cache" if answer.engine_fits else "too large beside a cache"
        yield f"  {'a GPU of an engine':<20}{answer.engine / GB:.1f} GB: {left}"
    yield f"  {'loading':<20}{answer.host / GB:.0f} GB of a node's memory"
    yield f"  {'a checkpoint':<20}{_in_gb(answer.checkpoint)}"
    yield f"  {'  asynchronous':<20}{_in_gb(answer.copy)} of host memory for a rank"


def _verdict(fits: bool, tight: bool) -> str:
    return TIGHT if tight else "fits" if fits else "too large"


def _in_gb(size: float) -> str:
    """Return a number of bytes as text, such as an adapter's few megabytes: ``0.04 GB``."""
    return f"{size / GB:.0f} GB" if size >= 10 * GB else f"{size / GB:.2f} GB"
