"""The weight channel over NCCL (two GPUs) and CUDA IPC (one). Not part of `make test`.

PYTHONPATH=src python -m pytest tests/gpu/test_channel_on_gpu.py
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pytest
import torch
from torch import Tensor

from lachesis.common.deadline import Deadline
from lachesis.common.errors import EngineError
from lachesis.transport.channel import Channel
from lachesis.transport.digest import digests
from lachesis.transport.layout import ReceivedTensor
from lachesis.transport.rendezvous import listen

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BACKENDS = [
    pytest.param("ipc", "cuda:0"),
    pytest.param("nccl", "cuda:1", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")),
    pytest.param("gloo", "cuda:0"),
]
BUCKET_BYTES = 8 << 20


def within(seconds: float = 60.0) -> Deadline:
    return Deadline("test: a transfer on the GPU", seconds)


def weights(update: int) -> dict[str, Tensor]:
    """Some 60 MB: many small tensors, and some larger than a bucket."""
    generator = torch.Generator(device="cuda").manual_seed(update)
    shapes = {f"lora.{i}": (4096, 16) for i in range(64)} | {f"large.{i}": (3000, 2000 + i) for i in range(4)}
    return {
        name: torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)
        for name, shape in shapes.items()
    }


def specs() -> tuple[ReceivedTensor, ...]:
    return tuple(ReceivedTensor(name, tuple(t.shape), "bfloat16") for name, t in weights(0).items())


def engine_process(pipe: Connection, backend: str, device: str, behaviour: str) -> None:
    """Receives updates and answers each with the digests of what arrived."""
    torch.cuda.set_device(device)
    channel = Channel.connect(
        init_method=pipe.recv(), world_size=2, rank=1, backend=backend, device=device, deadline=within()
    )
    while True:
        with channel.receive(specs(), deadline=within()) as tensors:
            held = {}
            for number, (name, tensor) in enumerate(tensors):
                held[name] = tensor.to(device, copy=True)
                if behaviour == "dies" and number == 65:
                    os._exit(9)
        pipe.send(digests(held))


def host_process(pipe: Connection, backend: str, device: str, behaviour: str) -> None:
    """Keeps each update on the host; answers with its digests and how often pinned memory was taken so far."""
    torch.cuda.set_device(device)
    channel = Channel.connect(
        init_method=pipe.recv(), world_size=2, rank=1, backend=backend, device=device, deadline=within()
    )
    while True:
        with channel.receive(specs(), deadline=within(), keep=torch.device("cpu")) as tensors:
            held = dict(tensors)
            torch.cuda.synchronize(device)
            assert all(tensor.is_pinned() for tensor in held.values()) or behaviour != "pinned"
            found = digests({name: tensor.to(device) for name, tensor in held.items()})
        pipe.send((found, torch.cuda.host_memory_stats()["num_host_alloc"]))


def start(
    backend: str, device: str, behaviour: str, *, side: Callable[..., None] = engine_process
) -> tuple[Channel, Connection]:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    context.Process(target=side, args=(theirs, backend, device, behaviour), daemon=True).start()
    theirs.close()
    rendezvous = listen("tcp://127.0.0.1:0")
    pipe.send(rendezvous.init_method)
    channel = Channel.connect(
        init_method=rendezvous.init_method,
        world_size=2,
        rank=0,
        backend=backend,  # type: ignore[arg-type]
        device="cuda:0",
        deadline=within(),
        rendezvous=rendezvous,
    )
    return channel, pipe


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_every_byte_arrives_update_after_update(backend: str, device: str):
    channel, pipe = start(backend, device, "works")
    for update in range(5):
        tensors = weights(update)
        started = time.perf_counter()
        channel.send(tensors.items(), specs(), deadline=within(), bucket_bytes=BUCKET_BYTES if update % 2 else 1 << 28)
        seconds = time.perf_counter() - started
        assert pipe.recv() == digests(tensors)
        assert update == 0 or seconds < 2.0
    channel.close()


@pytest.mark.parametrize(("backend", "device"), BACKENDS[:2])
def test_updates_that_are_kept_on_the_host_go_to_memory_that_is_taken_once(backend: str, device: str):
    channel, pipe = start(backend, device, "pinned", side=host_process)
    taken = []
    for update in range(4):
        tensors = weights(update)
        channel.send(tensors.items(), specs(), deadline=within(), bucket_bytes=BUCKET_BYTES)
        found, allocations = pipe.recv()
        assert found == digests(tensors)
        taken.append(allocations)
    assert taken[0] >= 5, "a bucket each"
    assert taken[-1] == taken[1], "later updates take none"
    channel.close()


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_weights_that_are_still_being_computed_arrive_computed(backend: str, device: str):
    """The optimizer's kernels are in flight when the transfer begins."""
    channel, pipe = start(backend, device, "works")
    tensors = weights(0)
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(50):
        busy = busy @ busy / 64.0
    expected = {name: tensor * 2 for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.mul_(2)
    channel.send(tensors.items(), specs(), deadline=within())
    for tensor in tensors.values():
        tensor.zero_()  # what is changed after the transfer is not sent
    assert pipe.recv() == digests(expected)
    channel.close()


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_an_engine_that_dies_in_the_middle_is_an_error_and_the_trainer_goes_on(backend: str, device: str):
    channel, _ = start(backend, device, "dies")
    deadline = within()
    with pytest.raises(EngineError):
        channel.send(weights(1).items(), specs(), deadline=deadline, bucket_bytes=BUCKET_BYTES)
    assert deadline.elapsed_s() < 30
    channel.close()
    channel, pipe = start(backend, device, "works")
    channel.send(weights(2).items(), specs(), deadline=within())
    assert pipe.recv() == digests(weights(2))
    channel.close()


def test_two_ranks_on_one_gpu_are_refused_by_nccl_in_words():
    with pytest.raises(EngineError, match=r"nccl|died") as caught:
        start("nccl", "cuda:0", "works")
    assert caught.value.remedy


@pytest.fixture(autouse=True)
def _no_default_group() -> Iterator[None]:
    """The channel lives beside torch's own default process group, and leaves none behind."""
    yield
    assert not torch.distributed.is_initialized()
