"""How fast a weight channel carries a model, beside vLLM's own packed sender: settings side by side, proof apart.

    PYTHONPATH=src python benchmarks/transfer.py [--tiny] [--senders N] [--only WORDS ...] [--repeats N] [--out FILE]
    PYTHONPATH=src python benchmarks/transfer.py --count RANKS

Each sender is a process with a GPU of its own and all of the model (the shapes of Llama 3.1 8B, random bf16); the
engine is a process with another GPU: it receives, has the whole update aside in its memory, and says so. What it does
with it then is not in here (``benchmarks/bridges.py --two-gpus`` measures that), and neither is gathering. With two
GPUs there is one sender; ``--senders 3`` takes four GPUs and has each of three send its share.

``--count RANKS`` measures nothing and needs no GPU: it counts what ranks of a sharded trainer gather and send, by us
and by vLLM's senders, which gather each parameter on all ranks and send from rank 0 alone.

``--tiny`` sends a small model over gloo on the CPU, where vLLM's sender, which is NCCL's, has no row.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from architectures import LLAMA_3_1_8B
from needs_gpu import require_gpu
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lachesis.bridges.senders import busy_senders, deal, spread_ranks
from lachesis.bridges.sent_weights import tensor_list
from lachesis.common.deadline import Deadline
from lachesis.engines.receiver import Receiver
from lachesis.engines.serving.backend import ReceiverSpec
from lachesis.transport.channel import Channel
from lachesis.transport.digest import digests
from lachesis.transport.layout import BUCKET_BYTES, WINDOW
from lachesis.transport.rendezvous import listen
from lachesis.transport.transports import GLOO_WINDOW

MIB = 2**20
TINY = {"vocab_size": 4096, "hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 512}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 4}
LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to send. ``aside``: the engine copies each tensor aside, in place of receiving into where it stays."""

    name: str
    window: int
    bucket_bytes: int
    aside: bool = False
    vllm: bool = False


# As bridge.senders at most.
MOST_SENDERS = 8


def settings(*, tiny: bool, senders: int) -> list[Setting]:
    """The rows. On the CPU buckets are smaller, as the model is."""
    unit, usual = (2**18, GLOO_WINDOW) if tiny else (BUCKET_BYTES, WINDOW)
    rows = [
        Setting("a bucket at a time, copied aside: as before", 1, unit, aside=True),
        Setting("a bucket at a time", 1, unit),
        *(Setting(f"a window of {count}{': the default' * (count == usual)}", count, unit) for count in (2, 4, 8)),
        Setting("a window of 4, buckets of a quarter", 4, unit // 4),
        Setting("a window of 2, buckets four times as large", 2, 4 * unit),
    ]
    if senders == 1 and not tiny:
        rows.append(Setting("vLLM's packed NCCL sender", 2, 1024 * MIB, vllm=True))
    return rows


def make_empty(fields: Mapping[str, Any]) -> dict[str, Tensor]:
    """The model's tensors without bytes."""
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(LlamaConfig(**fields))
    return {name: parameter.detach().to(torch.bfloat16) for name, parameter in model.named_parameters()}


def make_weights(fields: Mapping[str, Any], device: str) -> dict[str, Tensor]:
    """Every tensor of the model, with random bytes that are the same in all processes of one kind of device."""
    shapes = {name: tensor.shape for name, tensor in make_empty(fields).items()}
    generator = torch.Generator(device=device).manual_seed(0)
    return {
        name: torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=0.02, generator=generator)
        for name, shape in shapes.items()
    }


def shares(tensors: Mapping[str, Tensor], senders: int) -> list[dict[str, Tensor]]:
    """What each sender sends, dealt out as ranks of a trainer deal it out."""
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    ranks = busy_senders(sizes, candidates=range(senders))
    parts = deal(sizes, senders=ranks)
    return [{n: tensors[n] for part in parts if part.sender == rank for n in part.names} for rank in ranks]


def within(what: str) -> Deadline:
    return Deadline(f"the benchmark: {what}", LIMIT_S)


def device_of(number: int, *, tiny: bool) -> str:
    return "cpu" if tiny else f"cuda:{number}"


def wait_for(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


class EngineSide:
    """The engine's process: told a setting, it connects, takes updates and answers each with what was asked for."""

    def __init__(self, pipe: Connection, fields: Mapping[str, Any], *, senders: int, tiny: bool) -> None:
        self.pipe = pipe
        self.device = device_of(senders, tiny=tiny)
        if not tiny:
            torch.cuda.set_device(self.device)
        self.specs = tensor_list(make_empty(fields))
        self.backend = "gloo" if tiny else "nccl"

    def run(self) -> None:
        """Until the pipe says so."""
        while (told := self.pipe.recv()) is not None:
            {"ours": self.ours, "aside": self.aside, "vllm": self.vllm}[told["how"]](told)

    def ours(self, told: Mapping[str, Any]) -> None:
        """As in an engine: by its receiver."""
        senders = told["addresses"]
        spec = ReceiverSpec(
            init_method=senders[0],
            senders=tuple(senders[1:]),
            sender_of=tuple(told["sender_of"]) if senders[1:] else (),
            world_size=2,
            backend=self.backend,  # type: ignore[arg-type]
            kind="full",
            tensors=self.specs,
        )
        receiver = Receiver(spec, rank=1, device=torch.device(self.device))
        for proof in self.updates():
            while receiver.status.state == "connecting":
                time.sleep(0.01)
            arriving = receiver.take(LIMIT_S)
            assert arriving is not None
            with receiver.loading():
                tensors = dict(arriving)
            self.answer(tensors, proof=proof)
        receiver.close()

    def aside(self, told: Mapping[str, Any]) -> None:
        """Each tensor is copied out of the receive buffer."""
        connect = {"world_size": 2, "rank": 1, "backend": self.backend, "device": self.device}
        channel = Channel.connect(init_method=told["addresses"][0], deadline=within("joining"), **connect)
        for proof in self.updates():
            with channel.receive(self.specs, deadline=within("receiving")) as arriving:
                tensors = {name: tensor.clone() for name, tensor in arriving}
            self.answer(tensors, proof=proof)
        channel.close()

    def vllm(self, told: Mapping[str, Any]) -> None:
        """vLLM's consumer, keeping what it is given as an engine of ours does."""
        receive = packed("consumer")
        group = vllm_group(told["port"], rank=1, device=self.device)
        for proof in self.updates():
            kept: dict[str, Tensor] = {}
            listed = ((spec.name, (list(spec.shape), torch.bfloat16)) for spec in self.specs)
            receive(iterator=listed, group=group, src=0, post_unpack_func=kept.update)
            wait_for(self.device)
            self.answer(kept, proof=proof)

    def updates(self) -> Iterator[bool]:
        """Whether each of the updates to come is proved."""
        while (proof := self.pipe.recv()) is not None:
            yield proof

    def answer(self, tensors: Mapping[str, Tensor], *, proof: bool) -> None:
        self.pipe.send(digests(tensors) if proof else None)


def engine_process(pipe: Connection, fields: Mapping[str, Any], senders: int, tiny: bool) -> None:
    EngineSide(pipe, fields, senders=senders, tiny=tiny).run()


def sender_process(pipe: Connection, fields: Mapping[str, Any], number: int, senders: int, tiny: bool) -> None:
    """One of several senders, beside the first, which is the program itself."""
    share = shares(make_weights(fields, device_of(number, tiny=tiny)), senders)[number]
    while (setting := pipe.recv()) is not None:
        end = SenderEnd(share, setting, device=device_of(number, tiny=tiny))
        pipe.send(end.address)
        end.connect()
        while pipe.recv():
            end.send()
            pipe.send(True)
        end.channel.close()


class SenderEnd:
    """A sender's end of the channel of one setting."""

    channel: Channel

    def __init__(self, share: Mapping[str, Tensor], setting: Setting, *, device: str) -> None:
        self.share, self.setting, self.device = share, setting, device
        self._rendezvous = listen("tcp://127.0.0.1:0")
        self.address = self._rendezvous.init_method

    def connect(self) -> None:
        self.channel = Channel.connect(
            init_method=self.address,
            world_size=2,
            rank=0,
            backend="gloo" if self.device == "cpu" else "nccl",
            device=self.device,
            deadline=within("connecting"),
            rendezvous=self._rendezvous,
        )

    def send(self) -> None:
        setting = self.setting
        self.channel.send(
            self.share.items(),
            tensor_list(self.share),
            deadline=within("sending"),
            bucket_bytes=setting.bucket_bytes,
            window=setting.window,
        )


def packed(side: str) -> Callable[..., None]:
    """vLLM's producer or consumer, of whichever version is installed."""
    from vllm.distributed.weight_transfer import packed_tensor

    names = (f"packed_nccl_broadcast_{side}", f"packed_broadcast_{side}")
    function = next(getattr(packed_tensor, name) for name in names if hasattr(packed_tensor, name))
    takes = inspect.signature(function).parameters
    return partial(function, **({"buffer_size_bytes": 1024 * MIB} if "buffer_size_bytes" in takes else {}))


def vllm_group(port: int, *, rank: int, device: str) -> Any:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup

    group = StatelessProcessGroup.create(host="127.0.0.1", port=port, rank=rank, world_size=2)
    return PyNcclCommunicator(group, device=torch.device(device))


class Bench:
    """The program itself: the first sender, with the others and the engine beside it."""

    def __init__(self, *, tiny: bool, senders: int, repeats: int) -> None:
        self.tiny, self.senders, self.repeats = tiny, senders, repeats
        self.fields: dict[str, Any] = {**LLAMA_3_1_8B, **(TINY if tiny else {})}
        self.device = device_of(0, tiny=tiny)
        self.tensors = make_weights(self.fields, self.device)
        self.num_bytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self._processes: list[Any] = []
        self.engine = self._start(engine_process, self.fields, senders, tiny)
        self.others = [self._start(sender_process, self.fields, number, senders, tiny) for number in range(1, senders)]

    def _start(self, target: Callable[..., None], *arguments: Any) -> Connection:
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        process.start()
        theirs.close()
        self._processes.append(process)
        return ours

    def measure(self, setting: Setting) -> dict[str, Any]:
        """Seconds of each update, without and with its proof; a failure is part of the result."""
        try:
            update, finish = (self._vllm if setting.vllm else self._ours)(setting)
        except (ImportError, StopIteration, AttributeError) as error:
            return {"name": setting.name, "failed": f"{type(error).__name__}: {error}"}
        seconds = {
            proof: [self._timed(update, proof=proof) for _ in range(1 + self.repeats)][1:] for proof in (False, True)
        }
        self.engine.send(None)
        finish()
        median = statistics.median(seconds[False])
        return {
            "name": setting.name,
            "seconds": median,
            "worst": max(seconds[False]),
            "with proof": statistics.median(seconds[True]),
            "GB/s": self.num_bytes / median / 1e9,
        }

    def _timed(self, update: Callable[[], None], *, proof: bool) -> float:
        wait_for(self.device)
        self.engine.send(proof)
        began = time.perf_counter()
        update()
        expected = digests(self.tensors) if proof else None
        found = self.engine.recv()
        seconds = time.perf_counter() - began
        if found != expected:
            raise SystemExit("the engine has other bytes than were sent")
        return seconds

    def _ours(self, setting: Setting) -> tuple[Callable[[], None], Callable[[], None]]:
        for other in self.others:
            other.send(setting)
        dealt = shares(self.tensors, self.senders)
        end = SenderEnd(dealt[0], setting, device=self.device)
        addresses = [end.address, *(other.recv() for other in self.others)]
        number_of = {name: number for number, share in enumerate(dealt) for name in share}
        how = "aside" if setting.aside and self.senders == 1 else "ours"
        sender_of = [number_of[name] for name in self.tensors]
        self.engine.send({"how": how, "addresses": addresses, "sender_of": sender_of})
        end.connect()

        def update() -> None:
            for other in self.others:
                other.send(True)
            end.send()
            for other in self.others:
                other.recv()

        def finish() -> None:
            for other in self.others:
                other.send(False)
            end.channel.close()

        return update, finish

    def _vllm(self, setting: Setting) -> tuple[Callable[[], None], Callable[[], None]]:
        send = packed("producer")
        port = int(listen("tcp://127.0.0.1:0").init_method.rpartition(":")[2])
        self.engine.send({"how": "vllm", "port": port})
        group = vllm_group(port, rank=0, device=self.device)

        def update() -> None:
            send(iterator=iter(self.tensors.items()), group=group, src=0, post_iter_func=lambda item: item[1])
            wait_for(self.device)

        return update, lambda: None

    def close(self) -> None:
        for pipe in (self.engine, *self.others):
            pipe.send(None)
        for process in self._processes:
            process.join(30)


def table(results: Sequence[Mapping[str, Any]], *, num_bytes: int, senders: int) -> str:
    """Markdown."""
    lines = [
        f"{num_bytes / 1e9:.3g} GB from {senders} sender{'s' * (senders > 1)} to one engine",
        "",
        "| | GB/s | seconds (worst) | proof included |",
        "|---|---|---|---|",
    ]
    for result in results:
        if "failed" in result:
            lines.append(f"| {result['name']} | did not run: {result['failed']} | | |")
            continue
        lines.append(
            f"| {result['name']} | {result['GB/s']:.3g} | {result['seconds']:.3f} ({result['worst']:.3f}) "
            f"| {result['with proof']:.3f} |"
        )
    versions = f"torch {torch.__version__}, Python {platform.python_version()}, {time.strftime('%d %B %Y')}"
    return "\n".join(lines) + f"\n\n{versions}\n"


def counted(ranks: int) -> str:
    """Markdown: of a model sharded over so many ranks."""
    sizes = {name: tensor.nbytes for name, tensor in make_empty(LLAMA_3_1_8B).items()}
    total = sum(sizes.values())
    parts = deal(sizes, senders=spread_ranks(ranks, most=MOST_SENDERS))
    sent = {part.sender: 0 for part in parts}
    for part in parts:
        sent[part.sender] += sum(sizes[name] for name in part.names)
    largest, elsewhere = max(sent.values()), (ranks - 1) / ranks
    rows = {
        f"`broadcast`, {len(sent)} senders": (len(parts), largest * elsewhere, largest),
        "a sender that gathers each parameter everywhere": (len(sizes), total * elsewhere, total),
    }
    lines = [
        f"{total / 1e9:.2f} GB, sharded over {ranks} ranks",
        "",
        "| | collectives to gather | gathered by a rank, GB | sent by a rank at most, GB |",
        "|---|---|---|---|",
        *(f"| {name} | {count} | {got / 1e9:.1f} | {gave / 1e9:.1f} |" for name, (count, got, gave) in rows.items()),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model over gloo on the CPU")
    parser.add_argument("--senders", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--only", nargs="*", default=None, help="rows in whose names one of these words stands")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--count", type=int, default=None, metavar="RANKS", help="count, and measure nothing")
    arguments = parser.parse_args()
    if arguments.count is not None:
        sys.stdout.write(counted(arguments.count))
        return
    require_gpu(tiny=arguments.tiny)
    if not arguments.tiny and torch.cuda.device_count() <= arguments.senders:
        count = torch.cuda.device_count()
        sys.exit(f"{arguments.senders} sender(s) and an engine take a GPU each, and there are {count}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    bench = Bench(tiny=arguments.tiny, senders=arguments.senders, repeats=arguments.repeats)
    results: list[dict[str, Any]] = []
    for setting in settings(tiny=arguments.tiny, senders=arguments.senders):
        if arguments.only is None or any(word in setting.name for word in arguments.only):
            results.append(bench.measure(setting))
            sys.stderr.write(json.dumps(results[-1]) + "\n")
    bench.close()
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(results))
    sys.stdout.write(table(results, num_bytes=bench.num_bytes, senders=arguments.senders))


if __name__ == "__main__":
    main()
