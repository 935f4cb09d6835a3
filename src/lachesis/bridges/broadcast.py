"""Broadcast bridges, which send weights straight into the engine: the adapter's (`lora_nccl`), or all (`broadcast`)."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn

from lachesis.bridges.base import EngineLeftOut, PolicyT, RankSent
from lachesis.bridges.external import ExternalBridge, Servers
from lachesis.bridges.senders import (
    SenderRanks,
    TransferPlan,
    busy_senders,
    dealt_specs,
    exhaust,
    spread_ranks,
    weight_sizes,
)
from lachesis.bridges.sent_weights import (
    Whole,
    as_saved,
    as_they_are,
    base_parameters,
    full_weights,
    lora_spec,
    lora_tensors,
    saved_shapes,
    tensor_list,
)
from lachesis.common.deadline import Deadline, Retry, wait_until
from lachesis.common.errors import DeadlineExceeded, EngineError, EngineUnreachable, LachesisError, StaleWeights
from lachesis.config.schema import BridgeCapabilities, BroadcastBridgeConfig, LoraBroadcastBridgeConfig
from lachesis.engines.http.control import ServerControl, ServerInfo
from lachesis.engines.serving.backend import LoraSpec, ReceiverSpec, TransferKind
from lachesis.process.threads import call_watched
from lachesis.transport.bridge_file import write_channel_file
from lachesis.transport.channel import Channel, Sent
from lachesis.transport.layout import BUCKET_BYTES, ChannelBackend, ReceivedTensor, Staging
from lachesis.transport.partners import Partners, SendPacked
from lachesis.transport.rendezvous import Aborted, PeerFailed, Rendezvous, address_towards, call_off, listen

logger = logging.getLogger(__name__)

T = TypeVar("T")
PolicyIn = TypeVar("PolicyIn", contravariant=True)

_POLL_S = 0.1
# Seconds that the side that did not fail first has to report what it saw.
_LAST_WORD_S = 5.0
# Seconds until a server has noticed that its engine is dead.
_NOTICE_S = 1.0


@dataclass(frozen=True, slots=True)
class TravellingWeights(Generic[PolicyT]):
    """Weights of a policy that travel: ``tensors`` yields name and tensor in the order of ``specs``.

    Both are told whether engines know weights by the names of a checkpoint rather than by transformers' names.
    """

    capabilities: BridgeCapabilities
    transfer: TransferKind
    specs: Callable[[PolicyT, bool], Sequence[ReceivedTensor]]
    tensors: Callable[[PolicyT, bool], Iterable[tuple[str, Tensor]]]
    lora: Callable[[PolicyT], LoraSpec] | None = None


def lora_source(
    model_of: Callable[[PolicyT], nn.Module], whole_of: Callable[[PolicyT], Whole] = lambda policy: as_they_are
) -> TravellingWeights[PolicyT]:
    """Return the adapter of a policy's model as a source; ``whole_of`` makes sharded parameters whole."""
    return TravellingWeights(
        capabilities=LoraBroadcastBridgeConfig.capabilities,
        transfer="lora",
        specs=lambda policy, _: tensor_list(lora_tensors(model_of(policy))),
        tensors=lambda policy, _: lora_tensors(model_of(policy), whole=whole_of(policy)).items(),
        lora=lambda policy: lora_spec(model_of(policy)),
    )


def full_source(
    model_of: Callable[[PolicyT], nn.Module], whole_of: Callable[[PolicyT], Whole] = lambda policy: as_they_are
) -> TravellingWeights[PolicyT]:
    """Return all weights of a policy's model as a source, with any adapter merged; ``whole_of`` makes them whole."""

    def specs(policy: PolicyT, saved: bool) -> Sequence[ReceivedTensor]:
        model = model_of(policy)
        return tensor_list(saved_shapes(model) if saved else base_parameters(model))

    def tensors(policy: PolicyT, saved: bool) -> Iterable[tuple[str, Tensor]]:
        weights = full_weights(model_of(policy), whole=whole_of(policy))
        return as_saved(model_of(policy), weights) if saved else weights

    return TravellingWeights(
        capabilities=BroadcastBridgeConfig.capabilities,
        transfer="full",
        specs=specs,
        tensors=tensors,
    )


class _HasModel(Protocol):
    @property
    def model(self) -> nn.Module: ...


def travelling(kind: TransferKind, whole: Whole) -> TravellingWeights[_HasModel]:
    """Return the weights that travel of a policy whose parameters ``whole`` makes whole."""
    make = lora_source if kind == "lora" else full_source
    return make(lambda policy: policy.model, lambda policy: whole)


class PackBuckets(Protocol[PolicyIn]):
    """Protocol by which all of a policy's ranks pack each bucket, as ``LeadingPolicy.pack_buckets`` does."""

    def __call__(
        self, policy: PolicyIn, kind: TransferKind, saved: bool, bucket_bytes: int, anew: bool, *, send: SendPacked
    ) -> None: ...


class BroadcastBridge(ExternalBridge[PolicyT]):
    """Bridge of channels from the trainer to all workers of all servers; nothing touches the disk.

    The channels are connected at the first transfer, and again after a failed transfer or a change of servers. If a
    server dies, fails or hangs during a transfer, it counts as dead and the transfer begins again with the others. An
    error of the second attempt is not blamed on a server, but raised.

    Args:
        source: weights to send, :func:`lora_source` or :func:`full_source`.
        backend: ``nccl`` between GPUs, ``ipc`` on one GPU, ``gloo`` on the CPU.
        device: of the trainer.
        init_method: where the workers meet the trainer, "tcp://HOST:PORT"; by default a free port of the address by
            which this machine reaches the servers.
        directory: where ``nccl_bridge_config.json`` goes, usually the run's.
        pack_buckets: with ``ipc``, if the engine is on the GPUs of several ranks: each rank packs the buckets that its
            GPU's worker reads.
        sender_ranks: the trainer's ranks that may send; each of them listens at a separate free port.
        staging: where an engine keeps an update before it is complete.
    """

    def __init__(
        self,
        servers: Servers[PolicyT],
        *,
        source: TravellingWeights[PolicyT],
        backend: ChannelBackend,
        device: torch.device | str,
        directory: Path,
        init_method: str | None = None,
        pack_buckets: PackBuckets[PolicyT] | None = None,
        sender_ranks: SenderRanks[PolicyT] | None = None,
        staging: Staging = "auto",
    ) -> None:
        super().__init__(servers, capabilities=source.capabilities)
        self._pack_buckets = pack_buckets
        self._sender_ranks = sender_ranks
        self._staging: Staging = staging
        self._source = source
        self._backend: ChannelBackend = backend
        self._device = torch.device(device)
        self._directory = Path(directory)
        self._init_method = init_method
        self._saved_names = False
        self._plan: TransferPlan | None = None
        self._channel: Channel | None = None
        self._connected: tuple[tuple[str, str], ...] = ()
        self._failures: list[tuple[str, EngineError]] = []  # of servers in the current transfer, the earliest first
        self._left_out: dict[int, str] = {}  # by version: why a server was left out, without the server's address
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="lachesis-broadcast")

    def _transfer(self, version: int, *, deadline: Deadline) -> None:
        started = time.perf_counter()
        servers = self.engine.sessions
        self._failures = []
        if self._channel is not None and servers != self._connected:
            self._disconnect()
        try:
            if self._channel is None:
                self._plan = self._planned(deadline)
            assert self._plan is not None
            self._exchange(version, self._plan, deadline=deadline)
            self._connected = servers
        except BaseException as error:
            self._disconnect()
            if len(servers) == 1 or not isinstance(error, EngineError | DeadlineExceeded):
                raise
            if self._some_died(servers) or self._leave_out(error, version=version):
                raise EngineLeftOut(error.message) from error
            raise
        if self.engine.sessions != servers:  # a server died after its last answer
            self._disconnect()
        logger.info("[NCCL] Weights synced in %.3f s (version %d)", time.perf_counter() - started, version)

    def _some_died(self, servers: tuple[tuple[str, str], ...]) -> bool:
        """Return True unless all servers live. A server notices its engine's death a moment later."""

        def all_live() -> str:
            self.engine.look()
            return "all live" if self.engine.sessions == servers else ""

        try:
            wait_until(all_live, Retry(Deadline("a check for dead servers", _NOTICE_S), longest_s=_POLL_S))
        except DeadlineExceeded:
            return False
        return True

    def _leave_out(self, error: EngineError | DeadlineExceeded, *, version: int) -> bool:
        """Mark a server dead that failed or hangs, and return True unless that leaves none."""
        if isinstance(error, DeadlineExceeded):
            answers = Deadline("an answer of a receiving server", _LAST_WORD_S)
            reason = f"it does not answer ({error.message})"
            return self.engine.lose_silent(lambda server: server.stop_receiver(deadline=answers), reason=reason)
        url = self._at_fault(error)
        if url is None or isinstance(error, StaleWeights):
            return False
        said = error.message.replace(url, "")
        if self._left_out.get(version) == said:
            return False
        self._left_out = {version: said}
        self.engine.fleet.died(url, error.message)
        return True

    def _at_fault(self, error: EngineError) -> str | None:
        """Return the address of the server that failed first, because others fail as a consequence."""
        peer = error if isinstance(error, PeerFailed) else error.__cause__
        if self._plan is not None and isinstance(peer, PeerFailed):
            return max((rank, url) for url, rank in self._plan.ranks.items() if rank <= peer.rank)[1]
        return next((url for url, failure in self._failures if failure is error), None)

    def _noting(self, call: Callable[[ServerControl], T]) -> Callable[[ServerControl], T]:
        """Wrap ``call`` so that a server's failure is recorded."""

        def noted(server: ServerControl) -> T:
            try:
                return call(server)
            except EngineError as error:
                self._failures.append((server.url, error))
                raise

        return noted

    def _exchange(self, version: int, plan: TransferPlan, *, deadline: Deadline) -> None:
        """Send this rank's part while other senders send theirs."""
        if len(plan.senders) == 1:
            self._send(version, plan, deadline=deadline)
            return
        assert self._sender_ranks is not None
        together = self._sender_ranks.of(self.policy)
        stream = together.share(plan.senders, saved=self._saved_names)
        began, failure, sent = time.perf_counter(), None, None
        told = {
            "senders": list(plan.senders),
            "saved": self._saved_names,
            "world_size": plan.world_size,
            "backend": self._backend,
            "what": deadline.name,
            "limit_s": deadline.remaining_s(),
        }
        with together.others("send", told) as answers:
            try:
                sent = self._send(version, plan, stream, deadline=deadline)
            except LachesisError as error:  # raised once the others have ended, too
                failure = error
                self._call_off(plan, error)
            exhaust(stream)
        if failure is not None:
            raise failure
        assert sent is not None
        self._rank_sent = {0: RankSent(time.perf_counter() - began, sent.num_bytes, sent.most_under_way)}
        self._note_others(answers)

    def _note_others(self, answers: Sequence[Mapping[str, Any]]) -> None:
        for rank, answer in enumerate(answers, start=1):
            if "error" in answer:
                raise EngineError(f"rank {rank} of the trainer could not send its share: {answer['error']}")
            self._rank_sent[rank] = RankSent(answer["seconds"], answer.get("bytes", 0), answer.get("most_under_way", 0))

    def _call_off(self, plan: TransferPlan, error: LachesisError) -> None:
        """End the other senders' waits for engines that have not come, or will not answer."""
        for address in plan.addresses:
            call_off(address, secret=plan.secret, reason=error.message)
        self._stop_receivers(Deadline("stopping the engine's receivers", _LAST_WORD_S))

    def _send(
        self, version: int, plan: TransferPlan, share: Iterable[tuple[str, Tensor]] | None = None, *, deadline: Deadline
    ) -> Sent:
        """Tell the servers to receive while the trainer sends; an error of either side ends both."""
        if self._channel is None:
            self._connect(plan, deadline)
        channel = self._channel
        assert channel is not None
        received = self._threads.submit(
            self.engine.on_all, self._noting(lambda server: self._receive(server, version, deadline)), together=True
        )
        received.add_done_callback(lambda future: _abort_on_error(channel, future))
        try:
            sent = self._send_tensors(channel, plan, share, deadline=deadline)
        except Aborted:
            received.result()  # raises what a server said
            raise
        except DeadlineExceeded:
            raise
        except EngineError as error:
            raise _with_servers_reason(error, received, version=version) from error
        received.result()
        return sent

    def _receive(self, server: ServerControl, version: int, deadline: Deadline) -> None:
        began = time.perf_counter()
        server.receive(version, deadline=deadline)
        self._engine_seconds[urlsplit(server.url).netloc] = time.perf_counter() - began

    def _send_tensors(
        self, channel: Channel, plan: TransferPlan, share: Iterable[tuple[str, Tensor]] | None, *, deadline: Deadline
    ) -> Sent:
        """Send this rank's share, or everything if it is the only sender."""
        if self._pack_buckets is None:
            tensors = self._source.tensors(self.policy, self._saved_names) if share is None else share
            return channel.send(tensors, plan.own, deadline=deadline)
        anew, sent = channel.updates == 0, list[Sent]()

        def send(tensors: Iterator[tuple[str, Tensor]], partners: Partners) -> None:
            sent.append(
                channel.send(tensors, plan.own, deadline=deadline, bucket_bytes=BUCKET_BYTES, partners=partners)
            )

        self._pack_buckets(self.policy, self._source.transfer, self._saved_names, BUCKET_BYTES, anew, send=send)
        if anew:
            pairs = ", ".join(f"{worker} of rank {rank}" for worker, rank in sorted(channel.read_ranks.items()))
            logger.info("[NCCL] The engine's workers read the ranks' buckets in place, on their own GPUs: %s", pairs)
        return sent[0]

    def renew(self) -> None:
        self._disconnect()
        super().renew()

    def close(self) -> None:
        if self._channel is not None:
            self._disconnect()
            self._stop_receivers(Deadline("stopping the engine's receivers", _LAST_WORD_S))
        self._threads.shutdown(wait=False)
        super().close()

    def _planned(self, deadline: Deadline) -> TransferPlan:
        """Return the plan of senders, tensors and receivers.

        Raises:
            StaleWeights: a server was replaced since this run met it.
        """
        infos = self._infos(deadline)
        # vLLM loads a checkpoint's tensors; our own servers hold transformers' parameters.
        self._saved_names = saved = any(info.engine.startswith("vllm") for info in infos)
        ranks, world_size = _ranks(infos)
        self._stop_receivers(deadline)
        # The secret travels with the request to join, which requires the session's token.
        secret = secrets.token_hex(32)
        found = self._listening(secret)
        if len(found) == 1:
            tensors = tuple(self._source.specs(self.policy, saved))
            return TransferPlan(tensors=tensors, ranks=ranks, world_size=world_size, secret=secret)
        assert self._sender_ranks is not None
        tensors, sender_of = dealt_specs(self._sender_ranks.of(self.policy).model, senders=tuple(found), saved=saved)
        return TransferPlan(
            tensors=tensors,
            ranks=ranks,
            world_size=world_size,
            secret=secret,
            senders=tuple(found),
            addresses=tuple(found.values())[1:],
            sender_of=sender_of,
        )

    def _listening(self, secret: str) -> dict[int, str]:
        """Return the ranks that send, with the addresses at which those other than 0 listen."""
        if self._sender_ranks is None:
            return {0: ""}
        together = self._sender_ranks.of(self.policy)
        sizes = weight_sizes(together.model)
        candidates = busy_senders(sizes, candidates=spread_ranks(together.num_ranks, most=self._sender_ranks.most))
        if len(candidates) == 1:
            return {0: ""}
        urls = [control.url for control in self.engine.living]
        told = {"candidates": list(candidates), "urls": urls, "secret": secret, "host": socket.gethostname()}
        with together.others("listen", told) as answers:
            pass
        found = {0: ""}
        for rank, answer in enumerate(answers, start=1):
            if "address" in answer:
                found[rank] = answer["address"]
            elif "error" in answer:
                logger.warning("[NCCL] Rank %d sends no weights: %s", rank, answer["error"])
        return {rank: found[rank] for rank in busy_senders(sizes, candidates=[*found])}

    def _connect(self, plan: TransferPlan, deadline: Deadline) -> None:
        """Make all servers join new channels; this rank's channel is connected on return.

        Raises:
            EngineError: a server refuses, does not answer, or its worker cannot join.
            DeadlineExceeded: a worker did not come.
        """
        address = self._init_method or f"tcp://{address_towards([c.url for c in self.engine.living])}:0"
        rendezvous = listen(address, secret=plan.secret)
        cancel, made = threading.Event(), list[Channel]()

        def connect() -> Channel:
            channel = Channel.connect(
                init_method=rendezvous.init_method,
                world_size=plan.world_size,
                rank=0,
                backend=self._backend,
                device=self._device,
                deadline=deadline,
                rendezvous=rendezvous,
                cancel=cancel,
            )
            made.append(channel)
            if cancel.is_set():
                channel.close()
            return channel

        def watch() -> None:
            # If a server reports that its side failed, its worker will never connect.
            self._not_connected(plan, deadline)

        try:
            self._start_receivers(rendezvous, plan, deadline=deadline)
            self._channel = call_watched(connect, watch=watch, every_s=_POLL_S)
            # The workers have joined; the servers learn of it a moment later, and refuse to receive before.
            retry = Retry(deadline, first_s=_POLL_S / 10, longest_s=_POLL_S / 10)
            wait_until(lambda: self._not_connected(plan, deadline), retry)
            self._write_file(rendezvous, plan)
        except BaseException:
            cancel.set()
            for channel in made:
                channel.close()
            rendezvous.listener.close()
            self._disconnect()
            raise

    def _infos(self, deadline: Deadline) -> Sequence[ServerInfo]:
        """Return the servers' present descriptions.

        Raises StaleWeights if one was replaced since this run met it.
        """
        infos = self.engine.on_each(lambda server: server.info(deadline=deadline))
        for server, info in infos:
            self.engine.check_session(server, info.session_id)
        return [info for _, info in infos]

    def _start_receivers(self, rendezvous: Rendezvous, plan: TransferPlan, *, deadline: Deadline) -> None:
        lora = self._source.lora(self.policy) if self._source.lora is not None else None

        def start(server: ServerControl) -> None:
            spec = ReceiverSpec(
                init_method=rendezvous.init_method,
                world_size=plan.world_size,
                backend=self._backend,
                kind=self._source.transfer,
                tensors=plan.tensors,
                rank=plan.ranks[server.url],
                lora=lora,
                secret=plan.secret,
                senders=plan.addresses,
                sender_of=plan.sender_of,
                staging=self._staging,
            )
            try:
                server.start_receiver(spec, deadline=deadline)
            except DeadlineExceeded:
                raise
            except LachesisError as error:
                raise EngineError(
                    f"Failed to start NCCL receiver on vLLM ({server.url}): {error.message}", remedy=error.remedy
                ) from error

        self.engine.on_all(self._noting(start), together=True)

    def _not_connected(self, plan: TransferPlan, deadline: Deadline) -> str:
        """Return why the receivers are not all connected yet.

        Raises EngineError if one has failed, or if a server was lost.
        """
        check = self._noting(lambda server: _check_receiver(server, deadline))
        connected = self.engine.on_all(check, together=True)
        if len(connected) < len(plan.ranks):
            raise EngineUnreachable("an engine was lost before its receiver was connected")
        return "" if all(connected) else "a server's receiver is not connected"

    def _write_file(self, rendezvous: Rendezvous, plan: TransferPlan) -> None:
        write_channel_file(
            self._directory,
            init_method=rendezvous.init_method,
            world_size=plan.world_size,
            tensors=plan.tensors,
            backend=self._backend,
            session_id=self.engine.session_id,
            url=",".join(server.url for server in self.engine.controls),
        )

    def _stop_receivers(self, deadline: Deadline) -> None:
        """Stop the servers' receivers.

        A failure is harmless: a server that still has a receiver refuses the next one with a reason.
        """
        with suppress(LachesisError):
            self.engine.on_all(lambda server: server.stop_receiver(deadline=deadline))

    def _disconnect(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def _ranks(infos: Sequence[ServerInfo]) -> tuple[dict[str, int], int]:
    """Return the first rank of each server by its address, and the world size: the trainer and all workers."""
    ranks: dict[str, int] = {}
    end = 1
    for info in infos:
        ranks[info.url] = end
        end += info.model.tensor_parallel_size
    return ranks, end


def _check_receiver(server: ServerControl, deadline: Deadline) -> bool:
    """Return True if the server's receiver is connected.

    Raises EngineError if it has failed.
    """
    try:
        status = server.receiver_status(deadline=deadline)
    except DeadlineExceeded:
        raise
    except LachesisError as error:
        raise EngineError(f"Failed to contact vLLM server: {error.message}", remedy=error.remedy) from error
    if status.state == "error":
        raise EngineError(
            f"vLLM NCCL setup failed on {server.url}: {status.detail or 'no reason given'}",
            remedy="read the engine's log; nccl needs separate GPUs for trainer and engine, ipc needs the same GPU",
        )
    return status.state == "connected"


def _abort_on_error(channel: Channel, received: Future[list[None]]) -> None:
    if not received.cancelled() and (error := received.exception()) is not None:
        channel.abort(str(error))


def _with_servers_reason(error: EngineError, received: Future[list[None]], *, version: int) -> EngineError:
    """Return an error that says why the trainer could not send, with the servers' observations."""
    wait([received], timeout=_LAST_WORD_S)
    reason = received.exception() if received.done() else None
    said = f"; the servers say: {reason}" if reason is not None else ""
    return EngineError(
        f"weight version {version} was not sent: {error.message}{said}", remedy=error.remedy or "read the engine's log"
    )
