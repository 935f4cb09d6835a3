"""State of the server: sessions, runs and samplers; each request becomes a job of the worker."""

from __future__ import annotations

import random
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from torch import Tensor

from lachesis.common.errors import DataError, LachesisError, TrainingError
from lachesis.plugins.tinker import wire
from lachesis.plugins.tinker.checkpoints import CheckpointStore, Saved
from lachesis.plugins.tinker.clients import Client
from lachesis.plugins.tinker.engines import Engines
from lachesis.plugins.tinker.records import LoraShape, PassResult
from lachesis.plugins.tinker.sampling import Prepared, Sampler, Weights
from lachesis.plugins.tinker.training import Base, TrainingRun
from lachesis.plugins.tinker.worker import Answer, Failure, Futures, Job, SampleJob, Sequenced, Worker, answered

T = TypeVar("T")

# Of weights saved for a sampling client without a name, a run keeps this many.
_UNNAMED_KEPT = 4
# Programs report every ten seconds. The runs of one that has been silent this long make room for others.
_GONE_S = 120.0


class Unknown(LachesisError):
    """Error for a session, run or sampler that does not exist, or no longer does."""


@dataclass(slots=True)
class Run:
    """A training run: its model, once the worker has made it, and the order of its requests.

    ``failed`` says why it could not be made.
    """

    session_id: str
    requests: Sequenced
    steps: int = 0
    trained_tokens: int = 0
    training: TrainingRun | None = None
    failed: str = ""
    user_metadata: Mapping[str, str] | None = None
    last_request: float = field(default_factory=time.time)
    unnamed: OrderedDict[str, Mapping[str, Tensor]] = field(default_factory=OrderedDict)

    @property
    def made(self) -> TrainingRun:
        """Return the run's model. Raises DataError if it could not be made."""
        if self.training is None:
            raise DataError(f"this run does not exist: {self.failed}", remedy="create another one")
        return self.training


@dataclass(slots=True)
class Session:
    """A client program: its client, and the time of its last request, on the monotonic clock."""

    client: Client
    heard: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class SamplingSession:
    """Session of a sampling client; without weights it samples from the base model.

    ``run_id`` names the run that keeps the weights in memory, ``path`` a checkpoint.
    """

    session_id: str
    weights: Weights | None = None
    path: str | None = None
    clients: int = 0
    number: int = 0
    run_id: str = ""


@dataclass(eq=False)
class Service:
    """The whole service; routes call its methods in the thread of the event loop.

    Args:
        base: the model.
        name: clients' name of it.
        tokenizer: the id from which clients load the tokenizer.
        session_s: seconds of silence after which a session's runs are forgotten; their checkpoints stay.
        seed: for requests without one.
        max_rank: the largest rank of an adapter.
    """

    base: Base
    base_sampler: Sampler
    store: CheckpointStore
    _: KW_ONLY
    name: str
    tokenizer: str
    session_s: float
    seed: int
    max_rank: int
    unembed: bool = True
    engines: Engines | None = None

    def __post_init__(self) -> None:
        self.futures = Futures()
        self.runs: dict[str, Run] = {}
        self.samplers: dict[str, SamplingSession] = {}
        longest = self.base.max_context
        self.max_context = min(longest, self.engines.max_context if self.engines else longest)
        self.sessions: dict[str, Session] = {}
        self.made_samplers = 0
        self._worker = Worker(self.base_sampler)

    # --- sessions ---------------------------------------------------------------------------------------------

    def create_session(self, client: Client) -> str:
        """Return a new session's id; forget sessions that have been silent for too long."""
        now = time.monotonic()
        for silent in [one for one, found in self.sessions.items() if found.heard < now - self.session_s]:
            self.finish_session(silent)
        session_id = uuid.uuid4().hex
        self.sessions[session_id] = Session(client)
        return session_id

    def hear(self, session_id: str) -> None:
        """Note that a session is alive. Raises Unknown if it does not exist or has ended."""
        if session_id not in self.sessions:
            raise Unknown(f"there is no session {session_id}, or it has ended", remedy="create a new ServiceClient")
        self.sessions[session_id].heard = time.monotonic()

    def finish_session(self, session_id: str) -> None:
        """Forget a session with its runs and samplers; their checkpoints stay."""
        lane = self._lane(session_id)
        for run_id in [run_id for run_id, run in self.runs.items() if run.session_id == session_id]:
            run = self.runs.pop(run_id)
            self._worker.submit(Job(partial(_close, run), lambda _: Answer(b"{}"), lane))
        for sampler_id in [key for key, one in self.samplers.items() if one.session_id == session_id]:
            del self.samplers[sampler_id]
        self.sessions.pop(session_id, None)
        self._worker.forget(lane)

    def owns(self, client: Client, name: str) -> bool:
        """Return True if a session, run, sampler or checkpoint of this name is the client's or does not exist.

        Their names begin with the session's id; checkpoints record their client, because they outlive the session.
        """
        if name.startswith("tinker://"):
            return self.store.find(name).owner == client.name
        found = self.sessions.get(name.partition(":")[0])
        return found is None or found.client.name == client.name

    def runs_of(self, client: Client) -> dict[str, Run]:
        """Return the client's runs by their ids."""
        return {run_id: run for run_id, run in self.runs.items() if self.owns(client, run_id)}

    def client_of(self, session_id: str) -> Client:
        """Return the client of a session."""
        found = self.sessions.get(session_id)
        return Client() if found is None else found.client

    def used_s(self, session_id: str) -> float:
        """Return the seconds of computing that the client of a session has used."""
        return self._worker.queue.used_s(self._lane(session_id))

    def waiting(self, session_id: str) -> int:
        """Return the number of waiting requests of a session's client."""
        return self._worker.queue.waiting(self._lane(session_id))

    def _lane(self, session_id: str) -> str:
        """Return the lane of a session's jobs: its client's, or its own if clients have no names."""
        return self.client_of(session_id).name or session_id

    def restore_run(self, session_id: str, shape: LoraShape, weights: Mapping[str, Tensor]) -> Run:
        """Return a run with an adapter that was saved, ready for more requests."""
        return Run(session_id, Sequenced(self._worker.submit), training=TrainingRun(self.base, shape, weights))

    def close(self) -> None:
        """Stop after the current computation; requests that wait fail."""
        left = self._worker.close()
        for job in [*left, *(job for run in self.runs.values() for job in run.requests.early.values())]:
            if isinstance(job, Job) and job.lost is not None:
                job.lost()
            job.future.set_result(Failure("the server ended before this was computed: send it again", "server"))
        if self.engines is not None:
            self.engines.close()

    # --- runs -------------------------------------------------------------------------------------------------

    def create_run(self, body: types.CreateModelRequest) -> str:
        """Return the id of the request; the run's own id follows from the session and its number there."""
        self._check_base(body.base_model)
        wire.check_optimizer(body.optimizer_config)
        seed = self._drawn("adapter", len(self.sessions), body.model_seq_id)
        shape = wire.lora_shape(body.lora_config, seed=seed, max_rank=self._most_rank(body.session_id))
        if not self.unembed:
            shape = replace(shape, train_unembed=False)
        return self._make_run(
            body,
            lambda: TrainingRun(self.base, shape),
            lambda run_id: wire.json_answer(types.CreateModelResponse(model_id=run_id)),
        )

    def load_run(self, body: types.LoadWeightsRequest) -> str:
        """Return the id of a request that loads a checkpoint, into a run or as a new one."""
        wire.check_optimizer(body.optimizer_config)
        if body.model_id is not None:
            run = self._run(body.model_id)
            work = partial(self._load, run, body)
            return self._in_order(run, body.seq_id, work, partial(_loaded, body.path, body.model_id))
        if body.base_model is not None:
            self._check_base(body.base_model)
        return self._make_run(body, partial(self._restored, body), lambda run_id: _loaded(body.path, run_id, None))

    def pass_through(self, message: pb.ForwardBackwardRequest) -> str:
        """Return the id of a forward or forward_backward."""
        run = self._run(message.model_id)

        def work() -> PassResult:
            try:
                asked = wire.read_pass(message)
            except DataError as error:
                if not message.forward_only:
                    run.made.drop_gradient(error)
                raise
            result = run.made.forward_backward(asked)
            if not asked.forward_only:
                run.trained_tokens += sum(datum.tokens.size for datum in asked.data)
            return result

        return self._in_order(run, message.seq_id, work, wire.pass_answer)

    def step(self, body: types.OptimStepRequest) -> str:
        """Return the id of an optimizer step."""
        run = self._run(body.model_id)

        def work() -> dict[str, float]:
            metrics = run.made.step(wire.adam_step(body.optim_params))
            run.steps += 1
            return metrics

        return self._in_order(
            run, body.seq_id, work, lambda metrics: wire.json_answer(types.OptimStepResponse(metrics=metrics))
        )

    def save(self, body: types.SaveWeightsRequest) -> str:
        """Return the id of a request that saves weights and optimizer."""
        run = self._run(body.model_id)
        work = partial(self._save, run, body, optimizer=True)
        return self._in_order(
            run, body.seq_id, work, lambda saved: wire.json_answer(types.SaveWeightsResponse(path=saved.path))
        )

    def save_for_sampler(self, body: types.SaveWeightsForSamplerRequest) -> str:
        """Return the id of a request that saves weights to sample with: as files, or for one sampling client."""
        run = self._run(body.model_id)
        if body.path is None:
            key = uuid.uuid4().hex
            sampler = SamplingSession(run.session_id, unnamed_weights(run, key), run_id=body.model_id)
            response = types.SaveWeightsForSamplerResponseInternal(sampling_session_id=self._add_sampler(sampler))
            answer = wire.json_answer(response)
            return self._in_order(run, body.seq_id, partial(_keep, run, key, kind=body.kind), lambda _: answer)
        work = partial(self._save, run, body, optimizer=False)
        saved_at = types.SaveWeightsForSamplerResponseInternal
        return self._in_order(run, body.seq_id, work, lambda saved: wire.json_answer(saved_at(path=saved.path)))

    def unload(self, body: types.UnloadModelRequest) -> str:
        """Return the id of a request that forgets a run."""
        run = self._run(body.model_id)
        del self.runs[body.model_id]
        answer = wire.json_answer(types.UnloadModelResponse(model_id=body.model_id))
        return self._submit(partial(_close, run), lambda _: answer, session_id=run.session_id)

    def info(self, run_id: str) -> types.GetInfoResponse:
        """Describe a run. Raises Unknown, or DataError if it could not be made."""
        shape = self._run(run_id).made.shape
        data = types.ModelData(
            arch=type(self.base.bank.model).__name__, model_name=self.name, tokenizer_id=self.tokenizer
        )
        return types.GetInfoResponse(
            type="get_info", model_data=data, model_id=run_id, is_lora=True, lora_rank=shape.rank, model_name=self.name
        )

    # --- samplers ---------------------------------------------------------------------------------------------

    def create_sampler(self, body: types.CreateSamplingSessionRequest) -> str:
        """Return the id of a new sampling session, of the base model or of saved weights."""
        self.hear(body.session_id)
        if body.base_model is not None:
            self._check_base(body.base_model)
        weights = None if body.model_path is None else self.saved_weights(body.model_path)
        return self._add_sampler(SamplingSession(body.session_id, weights, body.model_path))

    def sampler(self, sampler_id: str) -> SamplingSession:
        """Return a sampling session. Raises Unknown if it does not exist."""
        if (found := self.samplers.get(sampler_id)) is None:
            raise Unknown(f"there is no sampling session {sampler_id}", remedy="create a new sampling client")
        return found

    def sample(self, body: types.SampleRequest, *, client: Client) -> str:
        """Return the id of a request for completions. Raises LachesisError if it cannot be sampled."""
        number, lane = 0, client.name
        if body.sampling_session_id is not None:
            sampler = self.sampler(body.sampling_session_id)
            weights, number, lane = sampler.weights, sampler.number, self._lane(sampler.session_id)
        else:
            if body.base_model is not None:
                self._check_base(body.base_model)
            weights = None if body.model_path is None else self.saved_weights(body.model_path)
        request = wire.sample_request(
            body, seed=self._drawn("sample", number, body.seq_id), max_context=self.max_context
        )
        self.base_sampler.check(request)
        if self.engines is not None and (weights is None or not weights.has_head()):
            sampled = self.engines.submit(weights, request, prepare=partial(self._prepare, self.engines, lane))
            return self.futures.add(answered(sampled, wire.sample_answer))
        job = SampleJob(weights, request, wire.sample_answer, lane)
        self._worker.submit(job)
        return self.futures.add(job.future)

    def _prepare(self, engines: Engines, lane: str, weights: Weights) -> Future[Prepared]:
        """Begin to write an adapter, and the logprobs that prove it, for the engines, at its client's turn."""
        work = partial(self.base_sampler.prepare, weights, directory=engines.directory, canary=engines.canary.token_ids)
        return self._worker.call(work, lane=lane)

    def failed(self, error: LachesisError) -> str:
        """Return the id of a request that failed before any computation."""
        future: Future[Answer | Failure] = Future()
        future.set_result(Failure(str(error), "user"))
        return self.futures.add(future)

    # --- the work of jobs, in the worker's thread -----------------------------------------------------------------

    def _restored(self, body: types.LoadWeightsRequest) -> TrainingRun:
        saved, weights, optimizer = self._read(body)
        made = TrainingRun(self.base, saved.shape, weights)
        made.load(weights, optimizer)
        return made

    def _load(self, run: Run, body: types.LoadWeightsRequest) -> None:
        _, weights, optimizer = self._read(body)
        run.made.load(weights, optimizer)

    def _read(self, body: types.LoadWeightsRequest) -> tuple[Saved, Mapping[str, Tensor], Mapping[str, Tensor] | None]:
        saved = self.store.find(body.path)
        self._check_base(saved.base_model)
        return saved, self.store.weights(body.path), self.store.optimizer(body.path) if body.optimizer else None

    def _save(
        self, run: Run, body: types.SaveWeightsRequest | types.SaveWeightsForSamplerRequest, *, optimizer: bool
    ) -> Saved:
        training = run.made
        return self.store.save(
            body.model_id,
            "weights" if optimizer else "sampler_weights",
            body.path or uuid.uuid4().hex,
            base_model=self.name,
            shape=training.shape,
            config=self.base.bank.config(training.adapter),
            weights=training.weights(),
            optimizer=training.optimizer_state() if optimizer else None,
            ttl_s=body.ttl_seconds,
            overwrite=isinstance(body, types.SaveWeightsRequest) and body.overwrite,
            user_metadata=body.user_metadata,
            owner=self.client_of(run.session_id).name,
        )

    # --- small parts ------------------------------------------------------------------------------------------

    def _make_run(
        self,
        body: types.CreateModelRequest | types.LoadWeightsRequest,
        make: Callable[[], TrainingRun],
        answer: Callable[[str], Answer],
    ) -> str:
        """Return the id of the request that makes a run; a repeated one, as after a lost answer, makes the same run."""
        if body.session_id is None or body.model_seq_id is None or not 0 <= body.model_seq_id < 1 << 63:
            raise DataError(
                "the request names no run", remedy="send model_id, or session_id and model_seq_id from 0 on"
            )
        self.hear(body.session_id)
        run_id = f"{body.session_id}:train:{body.model_seq_id}"
        if run_id not in self.runs:
            self._check_room(self.client_of(body.session_id))
            texts = {name: str(value) for name, value in (body.user_metadata or {}).items()}
            run = Run(body.session_id, Sequenced(self._worker.submit), user_metadata=texts or None)
            work = partial(_make, run, make)
            run.requests.ids[0] = self._submit(work, lambda _: answer(run_id), session_id=body.session_id)
            self.runs[run_id] = run
        return self.runs[run_id].requests.ids[0]

    def _run(self, run_id: str) -> Run:
        if (run := self.runs.get(run_id)) is None:
            remedy = "create it again, from a saved state if there is one"
            raise Unknown(f"there is no run {run_id}, or no more: its session has ended", remedy=remedy)
        self.hear(run.session_id)
        run.last_request = time.time()
        return run

    def _check_room(self, client: Client) -> None:
        """Raise DataError if the client has as many runs as it may. Runs of programs that have gone do not count."""
        silent = time.monotonic() - _GONE_S
        for gone in {run.session_id for run in self.runs_of(client).values()} if client.max_runs else ():
            if self.sessions[gone].heard <= silent:
                self.finish_session(gone)
        if client.max_runs is not None and len(self.runs_of(client)) >= client.max_runs:
            raise DataError(
                f"{client.name} has {client.max_runs} runs, and may have no more at the same time",
                remedy="end one: close its session, or stop the program that made it",
            )

    def _most_rank(self, session_id: str | None) -> int:
        """Return the largest rank of an adapter that a session's client may have."""
        own = self.client_of(session_id or "").max_lora_rank
        return self.max_rank if own is None else min(own, self.max_rank)

    def _submit(self, work: Callable[[], T], encode: Callable[[T], Answer], *, session_id: str) -> str:
        job = Job(work, encode, self._lane(session_id))
        self._worker.submit(job)
        return self.futures.add(job.future)

    def _in_order(self, run: Run, number: int | None, work: Callable[[], T], encode: Callable[[T], Answer]) -> str:
        if not number:
            return self._submit(work, encode, session_id=run.session_id)
        if number not in run.requests.ids:
            job: Job[Any] = Job(work, encode, self._lane(run.session_id), partial(_lost, run))
            run.requests.ids[number] = self.futures.add(job.future)
            run.requests.add(number, job)
        return run.requests.ids[number]

    def _add_sampler(self, sampler: SamplingSession) -> str:
        self.made_samplers += 1
        sampler.number = self.made_samplers
        sampler_id = f"{sampler.session_id}:sample:{sampler.number}"
        self.samplers[sampler_id] = sampler
        return sampler_id

    def saved_weights(self, path: str) -> Weights:
        """Return a checkpoint's weights. Raises DataError if it does not exist, or is of another base model."""
        saved = self.store.find(path)
        self._check_base(saved.base_model)
        # A checkpoint that was overwritten keeps its path, but not its time.
        head = saved.shape.train_unembed
        return Weights(f"{path}@{saved.time}", lambda: (saved.shape, self.store.weights(path)), lambda: head)

    def _drawn(self, *place: object) -> int:
        """Derive a seed for a request without one from the server's seed and the request's place."""
        return random.Random(f"{self.seed} {place}").getrandbits(62)

    def _check_base(self, name: str) -> None:
        if name != self.name:
            raise DataError(
                f"the base model {name!r} is not served here, but {self.name!r}",
                remedy=f"ask for it, or start a server with --model {name}",
            )


def _make(run: Run, make: Callable[[], TrainingRun]) -> None:
    try:
        run.training = make()
    except LachesisError as error:
        run.failed = str(error)
        raise


def _close(run: Run) -> None:
    if run.training is not None:
        run.training.close()


def _lost(run: Run) -> None:
    """Note that a request of a run was not computed: a step after it would lack its gradient."""
    if run.training is not None:
        run.training.drop_gradient(TrainingError("the server was stopped before it was computed"))


def _keep(run: Run, key: str, *, kind: str) -> None:
    """Remember a run's current weights for one sampling client, and forget the oldest."""
    if kind != "snapshot":
        raise DataError(f"weights of the kind {kind!r} are not served", remedy="save a snapshot")
    run.unnamed[key] = run.made.weights()
    while len(run.unnamed) > _UNNAMED_KEPT:
        run.unnamed.popitem(last=False)


def unnamed_weights(run: Run, key: str) -> Weights:
    """Return the weights that a run keeps in memory under ``key``."""
    return Weights(key, partial(_unnamed, run, key), lambda: run.made.shape.train_unembed)


def _unnamed(run: Run, key: str) -> tuple[LoraShape, Mapping[str, Tensor]]:
    if key not in run.unnamed:
        raise DataError(
            f"the weights of this sampling client are gone: its run has saved {_UNNAMED_KEPT} newer ones",
            remedy="keep weights with save_weights_for_sampler(name) to sample with them later",
        )
    return run.made.shape, run.unnamed[key]


def _loaded(path: str, run_id: str, _: object) -> Answer:
    return wire.json_answer(types.LoadWeightsResponse(path=path, model_id=run_id, type="load_weights"))
