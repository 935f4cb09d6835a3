"""The weight channel: real processes over gloo, failures of either side included."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor

from lachesis.common.deadline import Deadline
from lachesis.common.errors import DeadlineExceeded, EngineError, LachesisError
from lachesis.transport.channel import Channel
from lachesis.transport.layout import ReceivedTensor, difference, plan_buckets, ring_bytes, to_wire
from lachesis.transport.rendezvous import Rendezvous, call_off, listen, parse_init_method
from lachesis.transport.shared_tensors import memory_directory
from lachesis.transport.transports import pinned
from tests.forkserver import forkserver
from tests.waiting import LONG_S

ANYWHERE = "tcp://127.0.0.1:0"
TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b": torch.arange(5, dtype=torch.bfloat16),
    "c": torch.tensor(7, dtype=torch.int64),
    "d": torch.full((40,), 2.5, dtype=torch.float16),
    "e": torch.zeros(0, 4),
}


def specs_of(tensors: dict[str, Tensor]) -> tuple[ReceivedTensor, ...]:
    return tuple(ReceivedTensor(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items())


SPECS = specs_of(TENSORS)


def within(seconds: float = LONG_S, name: str = "test: a transfer") -> Deadline:
    return Deadline(name, seconds)


def connect(rendezvous: Rendezvous, rank: int, *, world_size: int = 2, **options: Any) -> Channel:
    options = {"backend": "gloo", "device": "cpu", "deadline": within()} | options
    return Channel.connect(
        init_method=rendezvous.init_method,
        world_size=world_size,
        rank=rank,
        rendezvous=rendezvous if rank == 0 else None,
        **options,
    )


def pair(world_size: int = 2, **options: Any) -> list[Channel]:
    """All ranks in this process, each connected on a thread of its own."""
    rendezvous = listen(ANYWHERE)
    with ThreadPoolExecutor(world_size) as pool:
        return list(
            pool.map(lambda rank: connect(rendezvous, rank, world_size=world_size, **options), range(world_size))
        )


@pytest.fixture
def channels() -> Iterator[list[Channel]]:
    made = pair()
    yield made
    for channel in made:
        channel.close()


def in_thread(function: Any, *args: Any, **kwargs: Any) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def take(channel: Channel, specs: Sequence[ReceivedTensor] = SPECS, seconds: float = LONG_S) -> dict[str, Tensor]:
    with channel.receive(specs, deadline=within(seconds)) as tensors:
        return {name: tensor.clone() for name, tensor in tensors}


def assert_same(received: dict[str, Tensor], sent: dict[str, Tensor] = TENSORS) -> None:
    assert list(received) == list(sent)
    for name, tensor in sent.items():
        assert received[name].dtype == tensor.dtype
        assert torch.equal(received[name], tensor)


@pytest.mark.parametrize("bucket_bytes", [1, 300, 1 << 20])
@pytest.mark.parametrize("backend", ["gloo", "ipc"])
def test_tensors_arrive_as_they_were_sent_whatever_the_buckets(backend: str, bucket_bytes: int):
    trainer, engine = pair(backend=backend)
    received = in_thread(take, engine)
    trainer.send(TENSORS.items(), SPECS, deadline=within(), bucket_bytes=bucket_bytes)
    assert_same(received.result(LONG_S))
    for channel in (trainer, engine):
        channel.close()


def test_a_shared_buffer_grows_with_what_is_sent_and_goes_when_the_trainer_closes():
    before = set(memory_directory().iterdir())
    trainer, engine = pair(backend="ipc")
    for size in (10, 100_000, 1000, 300_000):
        tensors = {"t": torch.arange(size, dtype=torch.float32)}
        received = in_thread(take, engine, specs_of(tensors))
        trainer.send(tensors.items(), specs_of(tensors), deadline=within())
        assert_same(received.result(LONG_S), tensors)
        assert len(set(memory_directory().iterdir()) - before) <= 1
    trainer.close()
    engine.close()
    assert not set(memory_directory().iterdir()) - before


def test_updates_follow_each_other_and_are_counted(channels: list[Channel]):
    trainer, engine = channels
    for update in range(3):
        tensors = {name: tensor + update for name, tensor in TENSORS.items()}
        received = in_thread(take, engine)
        trainer.send(tensors.items(), SPECS, deadline=within())
        assert_same(received.result(LONG_S), tensors)
    assert (trainer.updates, engine.updates) == (3, 3)


@pytest.mark.parametrize("backend", ["gloo", "ipc"])
@pytest.mark.parametrize("window", [1, 3])
def test_a_window_of_buckets_is_under_way_and_no_more(backend: str, window: int):
    """While the engine looks at the first tensor the trainer makes the next ones, as far as there is room for them."""
    trainer, engine = pair(backend=backend)
    tensors = {f"t{i}": torch.full((64,), float(i)) for i in range(8)}
    made: list[str] = []
    seen = threading.Event()

    def make() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors.items():
            made.append(name)
            if len(made) == window:
                seen.set()
            yield name, tensor

    def take_slowly() -> tuple[dict[str, Tensor], int]:
        with engine.receive(specs_of(tensors), deadline=within()) as arriving:
            name, tensor = next(arriving)
            assert seen.wait(LONG_S)
            ahead = len(made)
            return {name: tensor.clone()} | {name: tensor.clone() for name, tensor in arriving}, ahead

    received = in_thread(take_slowly)
    sent = trainer.send(make(), specs_of(tensors), deadline=within(), bucket_bytes=256, window=window)
    arrived, ahead = received.result(LONG_S)
    assert_same(arrived, tensors)
    assert ahead == window
    assert (sent.num_bytes, sent.most_under_way) == (8 * 256, window * 256)
    for channel in (trainer, engine):
        channel.close()


@pytest.mark.parametrize("backend", ["gloo", "ipc"])
def test_tensors_that_are_kept_are_the_callers_own(backend: str):
    trainer, engine = pair(backend=backend)

    def keep() -> dict[str, Tensor]:
        with engine.receive(SPECS, deadline=within(), keep=torch.device("cpu")) as arriving:
            return dict(arriving)

    for update in range(2):
        received = in_thread(keep)
        tensors = {name: tensor + update for name, tensor in TENSORS.items()}
        trainer.send(tensors.items(), SPECS, deadline=within(), bucket_bytes=300, window=2)
        assert_same(received.result(LONG_S), tensors)
    for channel in (trainer, engine):
        channel.close()


@pytest.mark.parametrize(("backend", "window"), [("gloo", 2), ("ipc", 4)])
def test_as_many_buckets_are_under_way_as_suit_the_transport(backend: str, window: int):
    trainer, engine = pair(backend=backend)
    tensors = {f"t{i}": torch.full((64,), float(i)) for i in range(6)}
    received = in_thread(take, engine, specs_of(tensors))
    sent = trainer.send(tensors.items(), specs_of(tensors), deadline=within(), bucket_bytes=256)
    assert_same(received.result(LONG_S), tensors)
    assert sent.most_under_way == window * 256
    for channel in (trainer, engine):
        channel.close()


def test_several_workers_receive_the_same():
    trainer, *workers = pair(3)
    received = [in_thread(take, worker) for worker in workers]
    trainer.send(TENSORS.items(), SPECS, deadline=within(), bucket_bytes=300)
    for future in received:
        assert_same(future.result(LONG_S))
    for channel in (trainer, *workers):
        channel.close()


def test_tensors_are_taken_one_by_one_and_cast(channels: list[Channel]):
    trainer, engine = channels
    specs = tuple(ReceivedTensor(f"t{i}", (64,), "bfloat16") for i in range(6))
    alive: list[str] = []
    most = 0

    def make() -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for i, spec in enumerate(specs):
            alive.append(spec.name)
            most = max(most, len(alive))
            yield spec.name, torch.full((64,), float(i))  # float32, sent as bfloat16
            alive.remove(spec.name)

    received = in_thread(take, engine, specs)
    trainer.send(make(), specs, deadline=within(), bucket_bytes=128)
    assert most == 1
    for i, tensor in enumerate(received.result(LONG_S).values()):
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, torch.full((64,), float(i), dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s[:-1], "engine expects 4 tensors, but the trainer sends 5"),
        (lambda s: (s[1], s[0], *s[2:]), r"engine expects b \[5\] bfloat16 where the trainer sends a \[3, 4\] float32"),
        (lambda s: (ReceivedTensor("a", (4, 3), "float32"), *s[1:]), r"expects a \[4, 3\] float32 .* a \[3, 4\]"),
        (lambda s: (ReceivedTensor("a", (3, 4), "int32"), *s[1:]), "expects a .* int32 where"),
    ],
)
def test_a_disagreement_about_the_tensors_is_an_error_on_both_sides_and_breaks_nothing(channels, change, message):
    trainer, engine = channels
    received = in_thread(take, engine, change(SPECS))
    with pytest.raises(EngineError, match=f"refuses update 1.*{message}") as caught:
        trainer.send(TENSORS.items(), SPECS, deadline=within())
    assert caught.value.remedy
    with pytest.raises(EngineError, match=message):
        received.result(LONG_S)
    received = in_thread(take, engine)
    trainer.send(TENSORS.items(), SPECS, deadline=within())
    assert_same(received.result(LONG_S))
    assert (trainer.updates, engine.updates) == (2, 2)


def test_when_one_worker_refuses_the_others_forget_the_update():
    trainer, one, two = pair(3)
    first, second = in_thread(take, one), in_thread(take, two, SPECS[:2])
    with pytest.raises(EngineError, match="expects 2 tensors"):
        trainer.send(TENSORS.items(), SPECS, deadline=within())
    for future in (first, second):
        with pytest.raises(EngineError, match="expects 2 tensors"):
            future.result(LONG_S)
    first, second = in_thread(take, one), in_thread(take, two)
    trainer.send(TENSORS.items(), SPECS, deadline=within())
    assert_same(first.result(LONG_S))
    assert_same(second.result(LONG_S))
    for channel in (trainer, one, two):
        channel.close()


def sends_wrong(kind: str) -> list[tuple[str, Tensor]]:
    items = list(TENSORS.items())
    return {
        "too few": items[:-1],
        "too many": [*items, ("f", torch.zeros(1))],
        "wrong order": [items[1], items[0], *items[2:]],
        "wrong shape": [("a", torch.zeros(4, 3)), *items[1:]],
    }[kind]


@pytest.mark.parametrize("kind", ["too few", "too many", "wrong order", "wrong shape"])
def test_tensors_other_than_announced_fail_on_both_sides(channels: list[Channel], kind: str):
    trainer, engine = channels
    received = in_thread(take, engine)
    with pytest.raises(EngineError, match=r"expected to send|announced list"):
        trainer.send(sends_wrong(kind), SPECS, deadline=within(), bucket_bytes=1)
    with pytest.raises(EngineError, match=r"the trainer .* reports: EngineError: .*(expected to send|announced list)"):
        received.result(LONG_S)
    for channel, use in ((trainer, lambda: trainer.send([], (), deadline=within())), (engine, lambda: take(engine))):
        with pytest.raises(EngineError, match=r"can no longer be used.*connect both sides again"):
            use()
        channel.close()


def test_an_error_while_tensors_are_made_reaches_the_engine(channels: list[Channel]):
    trainer, engine = channels

    def make() -> Iterator[tuple[str, Tensor]]:
        yield "a", TENSORS["a"]
        raise ArithmeticError("no more memory for merging")

    received = in_thread(take, engine)
    with pytest.raises(ArithmeticError):
        trainer.send(make(), SPECS, deadline=within(), bucket_bytes=1)
    with pytest.raises(EngineError, match="ArithmeticError: no more memory for merging"):
        received.result(LONG_S)


def test_an_error_while_loading_reaches_the_trainer(channels: list[Channel]):
    trainer, engine = channels

    def load() -> None:
        with engine.receive(SPECS, deadline=within()) as tensors:
            next(tensors)
            raise LookupError("no parameter of this name")

    loaded = in_thread(load)
    with pytest.raises(EngineError, match=r"the engine \(rank 1\) reports: LookupError: no parameter of this name"):
        trainer.send(TENSORS.items(), SPECS, deadline=within(), bucket_bytes=1)
    with pytest.raises(LookupError):
        loaded.result(LONG_S)


def test_a_trainer_leaves_a_failed_update_without_waiting_for_what_nobody_takes(channels: list[Channel]):
    trainer, engine = channels
    received = in_thread(take, engine)
    with pytest.raises(EngineError, match="expected to send"):
        trainer.send(list(TENSORS.items())[:-1], SPECS, deadline=within(), bucket_bytes=1)
    with pytest.raises(EngineError):
        received.result(LONG_S)
    began = time.monotonic()
    trainer.close()
    assert time.monotonic() - began < LONG_S / 2


def test_an_engine_that_leaves_tensors_behind_fails_the_update(channels: list[Channel]):
    trainer, engine = channels

    def load() -> None:
        with engine.receive(SPECS, deadline=within()) as tensors:
            next(tensors)

    loaded = in_thread(load)
    with pytest.raises(EngineError, match="did not load the tensor 'b'"):
        trainer.send(TENSORS.items(), SPECS, deadline=within())
    with pytest.raises(EngineError, match="did not load the tensor 'b'"):
        loaded.result(LONG_S)


def test_a_deadline_without_an_update_leaves_the_channel_in_order(channels: list[Channel]):
    trainer, engine = channels
    with pytest.raises(DeadlineExceeded, match=r"test: a transfer .*has not sent an update of the weights"):
        take(engine, seconds=0.05)
    received = in_thread(take, engine)
    trainer.send(TENSORS.items(), SPECS, deadline=within())
    assert_same(received.result(LONG_S))


def test_an_engine_that_does_not_answer_ends_at_the_deadline(channels: list[Channel]):
    trainer, engine = channels
    with pytest.raises(DeadlineExceeded, match=r"the engine \(rank 1\) has not sent its answer to the header"):
        trainer.send(TENSORS.items(), SPECS, deadline=within(0.3))
    with pytest.raises(EngineError, match="can no longer be used"):
        trainer.send(TENSORS.items(), SPECS, deadline=within())
    with pytest.raises(EngineError, match="reports: DeadlineExceeded"):
        take(engine)
        take(engine)


def test_abort_from_another_thread_ends_a_wait(channels: list[Channel]):
    _, engine = channels
    received = in_thread(take, engine)
    engine.abort("the server is stopping")
    with pytest.raises(EngineError, match="aborted: the server is stopping"):
        received.result(LONG_S)


def test_closing_one_side_ends_the_others_wait_and_may_be_repeated(channels: list[Channel]):
    trainer, engine = channels
    received = in_thread(take, engine)
    trainer.close()
    trainer.close()
    with pytest.raises(EngineError, match=r"the trainer \(rank 0\) closed its end"):
        received.result(LONG_S)
    with pytest.raises(EngineError, match="can no longer be used: it was closed"):
        trainer.send(TENSORS.items(), SPECS, deadline=within())


def test_closing_from_another_thread_ends_a_wait_whenever_it_comes():
    for number in range(10):
        trainer, engine = pair()
        received = in_thread(take, engine)
        for _ in range(number * 300):  # some time, other each round
            pass
        engine.close()
        with pytest.raises(EngineError, match=r"aborted: the channel was closed|can no longer be used: it was closed"):
            received.result(LONG_S)
        trainer.close()


def test_each_side_has_its_own_direction(channels: list[Channel]):
    trainer, engine = channels
    with pytest.raises(EngineError, match="rank 0 sends, the others receive"):
        take(trainer)
    with pytest.raises(EngineError, match="rank 0 sends, the others receive"):
        engine.send(TENSORS.items(), SPECS, deadline=within())


def test_nobody_comes(tmp_path):
    rendezvous = listen(ANYWHERE)
    with pytest.raises(DeadlineExceeded, match=rf"ranks \[1\] have not connected to {rendezvous.init_method}"):
        connect(rendezvous, 0, deadline=within(0.05))
    with pytest.raises(DeadlineExceeded, match="the trainer does not answer"):  # it has been closed
        connect(rendezvous, 1, deadline=within(0.05))


def test_waiting_for_the_others_can_be_called_off():
    cancel = threading.Event()
    waiting = in_thread(connect, listen(ANYWHERE), 0, cancel=cancel)
    cancel.set()
    with pytest.raises(EngineError, match="was cancelled"):
        waiting.result(LONG_S)


@pytest.mark.parametrize("secret", ["", "of this job"])
def test_a_wait_for_the_others_is_called_off_from_another_process(secret: str):
    rendezvous = listen(ANYWHERE, secret=secret)
    waiting = in_thread(connect, rendezvous, 0)
    if secret:
        call_off(rendezvous.init_method, secret="of another", reason="not for strangers")
    call_off(rendezvous.init_method, secret=secret, reason="an engine has died")
    with pytest.raises(EngineError, match="connecting the weight channel was cancelled: an engine has died"):
        waiting.result(LONG_S)
    call_off(rendezvous.init_method, secret=secret, reason="nobody waits any more")


@pytest.mark.parametrize("secret", ["", "that of another job"])
def test_who_does_not_know_the_secret_is_turned_away_unread(secret: str):
    rendezvous = listen(ANYWHERE, secret="of this job")
    trainer = in_thread(connect, rendezvous, 0)
    with pytest.raises(LachesisError):
        connect(rendezvous, 1, secret=secret, deadline=within(2.0))
    engine = connect(rendezvous, 1, secret="of this job")
    with closing(engine), closing(trainer.result(LONG_S)):
        assert engine.rank == 1


def test_strangers_at_the_door_are_turned_away():
    rendezvous = listen(ANYWHERE)
    trainer = in_thread(connect, rendezvous, 0)
    address = parse_init_method(rendezvous.init_method)
    for line in (b"GET / HTTP/1.1\r\n", b"[1]\n", b'{"rank": "x"\n', b""):
        with socket.create_connection(address) as stranger:
            stranger.sendall(line)
            stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(LONG_S)
            while stranger.recv(1000):
                pass
    engine = connect(rendezvous, 1)
    trainer.result(LONG_S).close()
    engine.close()


@pytest.mark.parametrize(
    ("theirs", "message"), [({"world_size": 3}, "world_size 3"), ({"backend": "ipc"}, "backend 'ipc'")]
)
def test_sides_that_do_not_fit_say_so(theirs: dict[str, Any], message: str):
    rendezvous = listen(ANYWHERE)
    trainer = in_thread(connect, rendezvous, 0)
    with pytest.raises(EngineError, match=f"reports: the engine has {message}, but the trainer expects"):
        connect(rendezvous, 1, **theirs)
    with pytest.raises(EngineError, match=f"vLLM NCCL setup failed.*{message}"):
        trainer.result(LONG_S)


def test_a_taken_port_and_bad_addresses():
    rendezvous = listen(ANYWHERE)
    with pytest.raises(EngineError, match=r"Failed to setup NCCL bridge.*cannot listen"), rendezvous.listener:
        listen(rendezvous.init_method)
    for text in (
        "localhost:29500",
        "http://localhost:29500",
        "tcp://localhost",
        "tcp://:5",
        "tcp://h:99999",
        "tcp://h:5/x",
    ):
        with pytest.raises(EngineError, match="does not have the form tcp://HOST:PORT"):
            parse_init_method(text)


def test_nccl_without_a_gpu_is_an_error_in_words(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rendezvous = listen(ANYWHERE)
    sides = [in_thread(connect, rendezvous, rank, backend="nccl") for rank in range(2)]
    for side in sides:
        with pytest.raises(EngineError, match=r"NCCL or no GPU|closed its end"):
            side.result(LONG_S)


@pytest.mark.parametrize("seed", range(40))
def test_no_two_buckets_that_are_under_way_lie_at_one_place(seed: int):
    source = random.Random(seed)
    sizes = [source.choice((0, 1, 250, source.randrange(2000))) for _ in range(source.randrange(1, 40))]
    limit, window = source.randrange(1, 900), source.randrange(1, 6)
    specs = [ReceivedTensor(f"t{i}", (size,), "int8") for i, size in enumerate(sizes)]
    buckets = plan_buckets(specs, limit_bytes=limit, window=window)
    assert [packed.tensor for bucket in buckets for packed in bucket.tensors] == specs
    largest = max(bucket.num_bytes for bucket in buckets)
    assert ring_bytes(buckets) <= max(largest, window * -(-limit // 256) * 256)
    for number, bucket in enumerate(buckets):
        assert bucket.after <= number
        for other in buckets[bucket.after : number]:
            assert bucket.place >= other.place + other.num_bytes or other.place >= bucket.place + bucket.num_bytes


def test_as_many_buckets_are_under_way_as_there_is_room_for():
    specs = [ReceivedTensor(f"t{i}", (200,), "int8") for i in range(6)]
    buckets = plan_buckets(specs, limit_bytes=256, window=3)
    assert [bucket.after for bucket in buckets] == [0, 0, 0, 1, 2, 3]
    assert [bucket.place for bucket in buckets] == [0, 256, 512, 0, 256, 512]
    assert ring_bytes(buckets) == 768


def test_buckets_are_bounded_aligned_and_in_order():
    specs = [ReceivedTensor(f"t{i}", (i,), "bfloat16") for i in (3, 500, 10, 0, 7)]
    buckets = plan_buckets(specs, limit_bytes=700)
    assert [[packed.tensor.name for packed in bucket.tensors] for bucket in buckets] == [
        ["t3"],
        ["t500"],
        ["t10", "t0", "t7"],
    ]
    assert [bucket.num_bytes for bucket in buckets] == [256, 1024, 512]
    assert all(packed.offset % 256 == 0 for bucket in buckets for packed in bucket.tensors)
    assert plan_buckets([], limit_bytes=700) == ()
    with pytest.raises(EngineError, match="'t3' occurs twice"):
        plan_buckets([specs[0], specs[0]], limit_bytes=700)
    with pytest.raises(EngineError, match="complex64"):
        plan_buckets([ReceivedTensor("z", (1,), "complex64")], limit_bytes=700)
    assert difference(specs, to_wire(specs)) is None
    assert difference(specs, {"not": "a list"}) is not None


def trainer_process(pipe: Connection, behaviour: str) -> None:
    """A trainer in a process of its own: tells its address, sends updates, and dies in the middle if asked to."""
    torch.set_num_threads(1)
    rendezvous = listen(ANYWHERE)
    pipe.send(rendezvous.init_method)
    channel = connect(rendezvous, 0)

    def make() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in TENSORS.items():
            if behaviour == "dies" and name == "c":
                os._exit(9)
            yield name, tensor

    channel.send(make(), SPECS, deadline=within(), bucket_bytes=1)
    pipe.send("sent")
    channel.close()


def engine_process(pipe: Connection, behaviour: str) -> None:
    torch.set_num_threads(1)
    channel = connect(Rendezvous(pipe.recv(), socket.socket()), 1)
    with channel.receive(SPECS, deadline=within()) as tensors:
        for name, _ in tensors:
            if behaviour == "dies" and name == "c":
                os._exit(9)
    pipe.send("received")


@pytest.fixture(scope="module")
def spawn() -> Iterator[Any]:
    """Starts processes from a server that has imported this module once."""
    context = forkserver()
    started = []

    def start(target: Any, behaviour: str) -> Connection:
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, behaviour), daemon=True)
        process.start()
        theirs.close()
        started.append(process)
        return ours

    yield start
    for process in started:
        process.join(LONG_S)


def test_two_processes(spawn):
    pipe = spawn(trainer_process, "works")
    engine = connect(Rendezvous(pipe.recv(), socket.socket()), 1)
    assert_same(take(engine))
    assert pipe.recv() == "sent"
    engine.close()


def test_a_trainer_that_dies_in_the_middle_is_an_error_in_the_engine_which_can_connect_anew(spawn):
    pipe = spawn(trainer_process, "dies")
    engine = connect(Rendezvous(pipe.recv(), socket.socket()), 1)
    with pytest.raises(EngineError, match=r"the trainer \(rank 0\) closed its end|Connection closed by peer"):
        take(engine)
    engine.close()
    pipe = spawn(trainer_process, "works")
    engine = connect(Rendezvous(pipe.recv(), socket.socket()), 1)
    assert_same(take(engine))
    engine.close()


def test_an_engine_that_dies_in_the_middle_is_an_error_in_the_trainer_which_can_connect_anew(spawn):
    for behaviour in ("dies", "works"):
        rendezvous = listen(ANYWHERE)
        pipe = spawn(engine_process, behaviour)
        pipe.send(rendezvous.init_method)
        trainer = connect(rendezvous, 0)
        if behaviour == "dies":
            with pytest.raises(EngineError, match=r"the engine \(rank 1\) closed its end|Connection closed by peer"):
                trainer.send(TENSORS.items(), SPECS, deadline=within(), bucket_bytes=1)
        else:
            trainer.send(TENSORS.items(), SPECS, deadline=within())
            assert pipe.recv() == "received"
        trainer.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU gives pinned memory")
def test_pinned_memory_that_cannot_be_had_is_an_error_that_says_what_to_do():
    with pytest.raises(EngineError, match="no pinned host memory") as caught:
        pinned(torch.Size([4]), dtype=torch.uint8)
    assert caught.value.remedy is not None and "engine.gpu_memory_utilization" in caught.value.remedy
