"""What every bridge owes to the loop. A bridge joins by adding a case to :mod:`tests.contracts.bridge_cases`.

One bridge of each case serves all tests of it, one after the other, for an engine is expensive. Servers are shared
by all cases of their kind but those that restart them.
"""

from __future__ import annotations

import copy
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from lachesis.bridges.broadcast import BroadcastBridge
from lachesis.bridges.external import ExternalBridge
from lachesis.bridges.in_process import InProcessBridge
from lachesis.bridges.proof import SyncProof, canary_alone
from lachesis.bridges.senders import SenderRanks
from lachesis.common.errors import EngineError, ModelError, StaleWeights, TrainingError
from lachesis.common.types import Completion, GenerationRequest, Group, Prompt, Sample, SamplingParams
from lachesis.config.schema import OptimizerConfig
from lachesis.engines.base import Engine
from lachesis.engines.embedded.engine import EmbeddedEngine
from lachesis.engines.fleet import State
from lachesis.engines.http.client import HttpEngine
from lachesis.train.batch import pack
from lachesis.train.distributed.strategy import SingleDevice
from lachesis.train.model.forward import plan_forward, target_logprobs
from lachesis.train.model.loading import LoadedModel
from lachesis.train.optim.optimizer import build_optimizer
from lachesis.train.policy import Policy
from tests.contracts.bridge_cases import (
    CANARY,
    EMBEDDED,
    IN_PROCESS,
    MORTAL,
    PROMPT,
    TINY,
    TOLERANCE,
    TWO_VLLM,
    VLLM,
    Case,
    Live,
    build,
    reset,
    soon,
)
from tests.contracts.bridge_faults import FAULTS, Tampering
from tests.contracts.servers import CHAT_TEMPLATE, MAX_LEN, TOKEN, Server, python_path
from tests.contracts.vllm_server import ENVIRONMENT, build_model, entry_point, needs_vllm
from tests.losses import loss_options
from tests.sender_ranks import ThreadRanks
from tests.tiny import EOS_ID, PAD_ID, tiny_model, tiny_tokenizer
from tests.unit.train.model.test_forward import random_groups
from tests.waiting import until

REQUESTS = 32


UPDATES = "test_three_updates_each_reach_the_engine_when_they_are_due"
# By case, where `make test` has a shorter one of its kind.
LONG = {
    "vllm: none": f"{UPDATES}[embedded: none]: each transfer starts vLLM anew",
    "two embedded: lora_only": f"{UPDATES}[two embedded: broadcast]: another bridge over two",
    "two embedded: lora_nccl": f"{UPDATES}[two embedded: broadcast]: another bridge over two",
    "two vllm: lora_nccl": "test_two_servers_of_vllm_take_each_update[two vllm: broadcast]: another bridge",
    "two vllm: lora_only": "test_two_servers_of_vllm_take_each_update[two vllm: broadcast]: another bridge",
}


def params(*cases: Case, long: Mapping[str, str] = LONG) -> list:
    marks = {"vllm": [needs_vllm, pytest.mark.timeout(600)]}
    seldom = {name: [pytest.mark.long(why)] for name, why in long.items()}
    return [
        pytest.param(case, id=case.name, marks=[*marks.get(case.engine, ()), *seldom.get(case.name, ())])
        for case in cases
    ]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model of each engine, as a directory."""
    parent, tokenizer = tmp_path_factory.mktemp("models"), tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    made = {"embedded": tiny_model(), "vllm": build_model()}
    for name, model in made.items():
        model.save_pretrained(parent / name)
        tokenizer.save_pretrained(parent / name)
    paths = {name: parent / name for name in made}
    return paths | {"in process": paths["embedded"]}


@pytest.fixture(scope="module")
def environment(session_environment: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory):
    """For servers that bridges start: this package from its sources, and vLLM small."""
    for name, value in ENVIRONMENT.items():
        session_environment.setenv(name, value)
    installed = entry_point(tmp_path_factory.mktemp("plugin"))
    session_environment.setenv("PYTHONPATH", python_path(installed))
    return session_environment


@pytest.fixture(scope="module", params=params(*IN_PROCESS, *EMBEDDED, *VLLM))
def live(
    request: pytest.FixtureRequest, models: dict[str, Path], environment: pytest.MonkeyPatch, tmp_path_factory
) -> Iterator[Live]:
    """The bridge of a case after its first synchronization."""
    with bridged(request.param, request, models, tmp_path_factory) as built:
        yield built


@contextmanager
def bridged(
    case: Case, request: pytest.FixtureRequest, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Live]:
    """The case's bridge after its first synchronization."""
    directory, model = tmp_path_factory.mktemp("run"), models[case.engine]
    servers: list[Server] = [request.getfixturevalue(name) for name in case.servers]
    for server in servers:
        reset(server)
    if servers:
        directory, model = servers[0].root / directory.name, servers[0].model
        directory.mkdir()
    tampering = Tampering()
    with pytest.MonkeyPatch.context() as patch:
        tampering.install(patch)
        built = build(case, model=model, directory=directory, servers=servers, tampering=tampering)
        try:
            built.bridge.sync(0)
            yield built
        finally:
            built.side.close()


def check_engine(live: Live, *, tolerance: float = TOLERANCE) -> None:
    """The engine has the trainer's weights: by the canary, by other tokens, by digests, and in what it samples."""
    assert live.difference() < tolerance
    assert live.difference(tuple(reversed(CANARY))) < tolerance, "not only on the canary itself"
    completions = live.generate()
    assert {completion.versions for completion in completions} == {(live.served, live.served)}
    for completion in completions:
        expected = live.policy.canary(PROMPT + completion.token_ids)[len(PROMPT) - 1 :]
        assert completion.logprobs == pytest.approx(expected, abs=tolerance)
    if isinstance(live.engine, HttpEngine):
        digests = live.digests()
        assert (digests is not None) == live.case.exact
        if digests is not None:
            ours, theirs = digests
            assert ours and {name: theirs.get(name) for name in ours} == ours


def test_three_updates_each_reach_the_engine_when_they_are_due(live: Live):
    live.catch_up()
    check_engine(live)
    for _ in range(3):
        served, before, sampled = live.served, live.engine.canary(CANARY), live.generate()
        live.update()
        after, health = live.engine.canary(CANARY), live.engine.health()
        assert health.ready
        assert health.version == live.served
        if live.served == served:
            assert after.logprobs == pytest.approx(before.logprobs, abs=1e-5), "between transfers nothing moves"
            assert {completion.versions for completion in live.generate()} == {(served, served)}
            continue
        assert live.served == live.version
        assert max(abs(a - b) for a, b in zip(before.logprobs, after.logprobs, strict=True)) > TOLERANCE
        assert [c.logprobs for c in live.generate()] != [c.logprobs for c in sampled], "the update was seen"
        check_engine(live)
        report = live.bridge.last_report
        assert report is not None and report.version == live.version
        assert report.canary_error is not None and 0 <= report.canary_error < TOLERANCE
        assert report.seconds > 0 and report.proof_seconds > 0
    assert live.served == 3


@pytest.mark.parametrize("case", params(*TWO_VLLM))
@pytest.mark.usefixtures("environment")
def test_two_servers_of_vllm_take_each_update(
    case: Case, request: pytest.FixtureRequest, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
):
    with bridged(case, request, models, tmp_path_factory) as live:
        for _ in range(2):
            live.update()
            check_each_server(live)
        if case.kind == "broadcast":
            assert isinstance(live.bridge, BroadcastBridge)
            ranks = ThreadRanks(live.policy.model, ranks=3)
            live.bridge._sender_ranks = SenderRanks(lambda _: ranks, most=8)
            live.bridge._disconnect()
            for _ in range(2):
                live.update()
                check_each_server(live)
                report = live.bridge.last_report
                assert report is not None and all(report.ranks[rank].num_bytes for rank in range(3))
                assert len(report.engines) == 2


@pytest.mark.parametrize(
    "case",
    params(
        *MORTAL,
        long={
            "vllm: lora_only": "test_a_server_whose_engine_is_dead_is_as_good_as_gone[two vllm: broadcast]: a lone one"
        },
    ),
)
@pytest.mark.usefixtures("environment")
def test_a_server_whose_engine_is_dead_is_as_good_as_gone(
    case: Case, request: pytest.FixtureRequest, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
):
    """What a machine's out-of-memory killer leaves: the weights' process is gone, and the server answers a while."""
    with bridged(case, request, models, tmp_path_factory) as live:
        *others, last = live.remote.controls
        before = last.info(deadline=soon("the last server"))
        for engine in psutil.Process(before.pid).children(recursive=True):
            engine.kill()
        live.update()
        rows = {row.url: row for row in live.side.rows()}
        if others:
            assert {rows[other.url].state for other in others} == {State.SERVING}
            assert rows[last.url].state is State.DEAD
            assert live.generate()[0].versions == (1, 1), "the others go on"
            until(lambda: served_again(live, last.url), "it was not replaced")
        assert last.info(deadline=soon("the last server")).session_id != before.session_id
        check_each_server(live)


@pytest.mark.long(
    "test_fleet.py::test_one_of_two_is_stopped_amid_a_transfer_and_serves_again_once_it_is_proved: a vLLM hangs"
)
@pytest.mark.parametrize("case", params(*(case for case in MORTAL if case.two)))
@pytest.mark.usefixtures("environment")
def test_a_server_whose_engine_hangs_in_a_transfer_is_left_out(
    case: Case, request: pytest.FixtureRequest, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
):
    """Its server goes on answering; the others have the weights once the transfer's time is over."""
    with bridged(case, request, models, tmp_path_factory) as live:
        *others, last = live.remote.controls
        info = last.info(deadline=soon("the last server"))
        live.bridge._sync_s = 20.0
        for engine in psutil.Process(info.pid).children(recursive=True):
            engine.suspend()
        live.update()
        rows = {row.url: row for row in live.side.rows()}
        assert {rows[other.url].state for other in others} == {State.SERVING}
        assert rows[last.url].state is State.DEAD and "does not answer" in rows[last.url].reason
        live.bridge._sync_s = 120.0
        until(lambda: served_again(live, last.url), "it was not replaced")
        check_each_server(live)


def served_again(live: Live, url: str) -> bool:
    live.update()
    row = next(row for row in live.side.rows() if row.url == url)
    return row.state is State.SERVING and row.version == live.version


def check_each_server(live: Live) -> None:
    check_engine(live)
    for control in live.remote.controls:
        reading = control.canary(CANARY, deadline=soon("one server's canary"))
        assert reading.version == live.version
        assert reading.logprobs == pytest.approx(live.policy.canary(CANARY), abs=TOLERANCE)


def test_a_step_that_fails_transfers_nothing_and_generation_goes_on(live: Live):
    live.catch_up()
    before, report = live.generate(), live.bridge.last_report
    with pytest.raises(TrainingError, match="not finite"), live.bridge.update_to(live.version + 1, due=True):
        raise TrainingError("the gradient is not finite")
    assert live.engine.health().ready
    assert live.engine.health().version == live.version
    after = live.generate()
    assert [c.token_ids for c in after] == [c.token_ids for c in before]
    assert {c.versions for c in after} == {(live.version, live.version)}
    assert live.bridge.last_report == report
    if not live.case.restarts:
        live.update()
        check_engine(live)


def test_an_engine_that_sleeps_while_the_trainer_computes_serves_its_update(live: Live, monkeypatch):
    if not isinstance(live.bridge, ExternalBridge) or live.bridge.capabilities.shares_storage or live.case.restarts:
        pytest.skip("it is never put to sleep")
    live.catch_up()
    level = 1 if live.bridge.capabilities.adapter_only else 2  # all of the weights come anew
    monkeypatch.setattr(live.bridge, "_servers", replace(live.bridge._servers, sleep_level=level))
    for _ in range(2):
        live.bridge.rest()
        assert "asleep" in live.engine.health().detail
        live.update()
        assert live.engine.health().ready
        check_engine(live)


def test_generation_stands_still_during_a_step_exactly_where_storage_is_shared(live: Live):
    live.catch_up()
    before = live.bridge.last_report
    with pytest.raises(TrainingError), live.bridge.update_to(live.version + 1, due=True):
        assert live.engine.health().paused == live.bridge.capabilities.shares_storage
        raise TrainingError("no step is wanted")
    assert not live.engine.health().paused
    assert live.bridge.last_report == before


class Crowd:
    """Thirty-two requests at the same time: a short one, whose end shows that they are at work, and long ones.

    vLLM is told to go on after the end-of-sequence token: a model that the updates before have made end early would
    be done with all of them before it is paused. The embedded server takes one call after the other.
    """

    def __init__(self, live: Live, *, seed: int = 0) -> None:
        engine = live.engine
        self.endless = live.case.engine == "vllm"
        long = SamplingParams(MAX_LEN - len(PROMPT), extra={"ignore_eos": True}) if self.endless else SamplingParams(64)
        self._pool = ThreadPoolExecutor(REQUESTS)
        self.requests = [GenerationRequest(PROMPT, SamplingParams(1), seed=seed)]
        self.requests += [GenerationRequest(PROMPT, long, n=2, seed=seed + i) for i in range(1, REQUESTS)]
        if isinstance(engine, HttpEngine):
            self._futures = [self._pool.submit(self._one, engine, [request]) for request in self.requests]
            self._futures[0].result(timeout=60)
        else:  # takes one call at a time
            self._futures = [self._pool.submit(self._one, engine, self.requests)]
            wait_until(lambda: engine.gate._calls == 1)  # type: ignore[attr-defined]

    @staticmethod
    def _one(engine: Engine, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        return engine.generate(requests, deadline=soon("requests in flight"))

    @property
    def unfinished(self) -> list[Future]:
        return [future for future in self._futures if not future.done()]

    def settled(self) -> list[Future]:
        """What is unfinished once no more answers come that were on their way; nothing, if they go on coming."""
        pause, unfinished = threading.Event(), self.unfinished
        while True:
            pause.wait(0.5)
            before, unfinished = unfinished, self.unfinished
            if unfinished == before:
                return unfinished

    def results(self) -> list[list[Completion]]:
        wait(self._futures, timeout=60)
        found = [group for future in self._futures for group in future.result(timeout=0)]
        self._pool.shutdown()
        return found


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll: what is waited for tells nobody."""
    pause = threading.Event()
    for _ in range(6000):
        if condition():
            return
        pause.wait(0.001)
    raise AssertionError("it did not happen")


def caught_in_flight(live: Live) -> tuple[Crowd, list[Future]]:
    """A crowd and its requests that a pause has caught; a machine that was held up between the two tries again."""
    for attempt in range(5):
        crowd = Crowd(live, seed=attempt * REQUESTS)
        live.engine.pause(mode="keep")
        if waiting := crowd.settled():
            return crowd, waiting
        live.engine.resume()
        check_whole(crowd)
    return crowd, []


def check_whole(crowd: Crowd) -> list[Completion]:
    """All completions, none lost and none cut."""
    results = crowd.results()
    assert [len(group) for group in results] == [request.n for request in crowd.requests]
    for request, group in zip(crowd.requests, results, strict=True):
        for completion in group:
            ended = completion.token_ids[-1] == EOS_ID and not request.params.extra
            assert ended or len(completion.token_ids) == request.params.max_tokens
            assert completion.finish_reason == ("stop" if ended else "length")
            assert all(math.isfinite(value) for value in completion.logprobs)
    return [completion for group in results for completion in group]


def test_a_pause_loses_none_of_32_requests(live: Live):
    live.catch_up()
    for _ in range(5):
        crowd, waiting = caught_in_flight(live)
        assert waiting, "they were in flight, and nothing is finished during a pause"
        assert live.engine.health().paused
        assert live.engine.canary(CANARY).logprobs
        # vLLM runs for that moment, and with the canary what is in flight: of that the most advanced may end.
        left = crowd.settled() if live.case.engine == "vllm" else crowd.unfinished
        assert live.engine.health().paused
        if left:
            break
        live.engine.resume()
        check_whole(crowd)
    assert left == waiting if live.case.engine != "vllm" else left and set(left) <= set(waiting)
    live.engine.resume()
    assert live.engine.health().ready
    completions = check_whole(crowd)
    assert {completion.versions for completion in completions} == {(live.served, live.served)}


def test_an_update_loses_none_of_32_requests(live: Live):
    if live.case.restarts:
        pytest.skip("a restart ends what is in flight; the loop generates between updates")
    live.catch_up()
    for attempt in range(5):  # a machine that is held up may have them all finished before the update
        before = live.version
        crowd = Crowd(live, seed=attempt * REQUESTS)
        live.update()
        versions = {completion.versions for completion in check_whole(crowd)}
        assert versions <= {(before, before), (before, live.version), (live.version, live.version)}
        if (before, live.version) in versions:
            break
    assert (before, live.version) in versions, "some were sampled under both"
    check_engine(live)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_arrive_is_stale_weights(live: Live, fault: str):
    if live.case.engine == "in process":
        pytest.skip("it has no transport; the faults of its own are below")
    if fault == "not read" and live.case.kind not in ("lora_only", "reload"):
        pytest.skip("there is nothing to be read")
    if live.case.restarts and fault not in ({"old"} if live.case.engine == "vllm" else {"old", "swapped"}):
        pytest.skip("every transfer is a start; what is saved and loaded is as for lora_only and reload")
    if not live.case.restarts:
        live.catch_up()
    before = live.policy.canary(CANARY)
    scale = TINY if live.case.exact else 1.0
    with pytest.raises(StaleWeights) as caught:
        live.update(scale=scale, due=True, fault=fault)
    assert caught.value.remedy
    moved = max(abs(a - b) for a, b in zip(before, live.policy.canary(CANARY), strict=True))
    if live.case.exact:
        assert moved < TOLERANCE, "no canary could have seen it"
        assert " from the trainer's (" in caught.value.message
    else:
        assert moved > TOLERANCE
        assert re.search("canary logprobs differ from|still computes as at", caught.value.message)
    assert live.engine.health().ready, "generation is not held up"
    if not live.case.restarts:
        live.update()
        check_engine(live)


def test_a_parameter_that_left_the_engines_memory_is_refused(live: Live):
    if live.case.kind != "shared_vllm":
        pytest.skip("it shares nothing that is trained")
    live.catch_up()
    weight = live.policy.transformer.get_parameter("model.layers.0.self_attn.q_proj.weight")
    shared = weight.data
    weight.data = shared.clone()
    with pytest.raises(ModelError, match=r"q_proj\.weight no longer lies in the engine's memory"):
        live.update()
    assert live.engine.health().ready
    weight.data = shared
    live.update()
    check_engine(live)


def test_closing_may_be_repeated_and_stops_what_was_started(live: Live):
    live.side.close()
    live.side.close()
    live.bridge.close()
    with pytest.raises(EngineError, match="closed"):
        live.generate()
    if live.side.owned is not None:
        assert live.side.owned.died(within_s=0.1)


class LaggingEngine(EmbeddedEngine):
    def set_version(self, version: int) -> None:
        super().set_version(max(0, version - 1))


class TestInProcess:
    """Faults of an engine in the trainer's process, which has no transport: it computes with other tensors."""

    TENSORS = (
        "embed_tokens", "layers.0.self_attn.q_proj", "layers.1.mlp.down_proj", "layers.1.input_layernorm", "lm_head",
    )  # fmt: skip

    @pytest.mark.parametrize("tensor", TENSORS)
    def test_a_single_tensor_that_differs_is_stale_weights(self, tensor: str):
        def changed(model: PreTrainedModel) -> PreTrainedModel:
            model = copy.deepcopy(model)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if tensor in name:
                        parameter *= 1.2
            return model

        self.refuse(r"differ from the trainer's by .* times what is allowed \(a mean of 0.001", model=changed)

    def test_weights_of_their_own_are_stale_weights(self):
        self.refuse("after the transfer of version 1", model=copy.deepcopy)

    def test_a_version_that_lags_is_stale_weights(self):
        self.refuse("weight version 0, but the trainer is at 1", engine=LaggingEngine)

    def test_another_session_is_stale_weights(self):
        self.refuse("this run works with of another run", session="of another run")

    def refuse(
        self,
        match: str,
        *,
        model: Callable[[PreTrainedModel], PreTrainedModel] = lambda model: model,
        engine: type[EmbeddedEngine] = EmbeddedEngine,
        session: str | None = None,
    ) -> None:
        """Somewhere between the first sync and the first update the fault is found, and generation goes on."""

        def build_engine(policy: Policy) -> EmbeddedEngine:
            return engine(
                model(policy.transformer),
                eos_token_ids=[EOS_ID],
                pad_token_id=PAD_ID,
                max_batch_size=16,
                max_context=64,
            )

        def build_proof(policy: Policy, built: Engine) -> SyncProof:
            return SyncProof(
                token_ids=lambda: CANARY,
                trainer=policy.canary,
                engine=canary_alone(built.canary),
                session_id=session or built.health().session_id,
                dtype="float32",
            )

        bridge: InProcessBridge[Policy] = InProcessBridge(engine_builder=build_engine, proof_builder=build_proof)
        policy = bridge.prepare(self.build_policy)
        with pytest.raises(StaleWeights, match=match) as caught:
            bridge.sync(0)
            policy.accumulate(pack(random_groups(groups=2, samples=4, longest=6, seed=1), max_tokens=256))
            with bridge.update_to(1):
                policy.step()
        assert caught.value.remedy
        assert bridge.engine.health().ready
        bridge.close()

    @staticmethod
    def build_policy() -> Policy:
        transformer = tiny_model()
        return Policy(
            LoadedModel(model=transformer, transformer=transformer, tokenizer=tiny_tokenizer()),
            strategy=SingleDevice(),
            optimizer_builder=partial(build_optimizer, config=OptimizerConfig(), learning_rate=2e-2, total_steps=10),
            options=loss_options(),
        )


TEMPERATURE, TOP_P = 0.7, 0.9


@torch.no_grad()
def nucleus_mass(model: PreTrainedModel, tokens: Sequence[int], *, start: int) -> list[float]:
    """For each token from ``start`` on, the probability of the nucleus it was drawn from; it has to be in it."""
    logits = model(input_ids=torch.tensor([tokens])).logits[0, start - 1 : -1].float()
    probabilities, order = (logits / TEMPERATURE).softmax(-1).sort(-1, descending=True)
    kept = probabilities.cumsum(-1) - probabilities < TOP_P
    drawn = order == torch.tensor(tokens[start:])[:, None]
    assert bool((drawn & kept).any(-1).all()), "no token from outside of the nucleus is drawn"
    return (probabilities * kept).sum(-1).tolist()


@pytest.mark.parametrize("kind", ["embedded", pytest.param("vllm", marks=[needs_vllm, pytest.mark.timeout(600)])])
def test_sampler_and_trainer_agree_on_a_truncated_distribution(kind: str, request: pytest.FixtureRequest):
    """The engine's logprobs are of what it sampled from; renormalized over the same nucleus the trainer's are equal."""
    server: Server = request.getfixturevalue(f"{kind}_server")
    reset(server)
    model = AutoModelForCausalLM.from_pretrained(server.model).eval()
    params = SamplingParams(24, temperature=TEMPERATURE, top_p=TOP_P)
    engine = HttpEngine([str(server.http.base_url)], token=TOKEN)
    completions = engine.generate([GenerationRequest(PROMPT, params, n=32, seed=7)], deadline=soon("sampling"))[0]
    engine.close()

    plan = plan_forward(model, packing="auto")
    ratios, naive = [], []
    for completion in completions:
        sample = Sample(
            PROMPT, completion.token_ids, completion.logprobs, completion.finish_reason, completion.versions,
            advantage=1.0, temperature=TEMPERATURE,
        )  # fmt: skip
        (micro,) = pack([Group(Prompt("0", PROMPT, ""), (sample,))], max_tokens=256).micro_batches
        with torch.no_grad():
            trainer = target_logprobs(model, micro, plan=plan).logprobs.tolist()
        masses = nucleus_mass(model, PROMPT + completion.token_ids, start=len(PROMPT))
        for ours, theirs, mass in zip(trainer, completion.logprobs, masses, strict=True):
            ratios.append(math.exp(ours - math.log(mass) - theirs))
            naive.append(math.exp(ours - theirs))
    assert len(ratios) > 200
    assert fmean(ratios) == pytest.approx(1.0, abs=1e-4)
    assert max(abs(ratio - 1.0) for ratio in ratios) < 2e-3
    assert TOP_P <= fmean(naive) < 0.99, "what the nucleus leaves out is missing from the trainer's own"
