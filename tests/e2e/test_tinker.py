"""The real client `tinker` against `lachesis tinker-server`: it trains, samples, saves and loads, runs side by side."""

from __future__ import annotations

import json
import math
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from lachesis.common.errors import DataError
from lachesis.plugins.checks.doctor import write_proof
from lachesis.plugins.tinker.adapters import AdapterBank
from lachesis.plugins.tinker.records import LoraShape
from tests.e2e.tinker_server import KEY, tinker_server
from tests.paths import ROOT
from tests.tiny import tiny_model
from tests.waiting import LONG_S

tinker = pytest.importorskip("tinker", reason="the client tinker is not installed")
types = tinker.types

ADAM = types.AdamParams(learning_rate=1e-2)
pytestmark = pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning")  # load_state, which is served all the same


class Served:
    """The server's address, the model that it serves, and where it keeps checkpoints."""

    def __init__(self, url: str, model: Path, directory: Path) -> None:
        self.url, self.model, self.directory = url, model, directory
        self.client = tinker.ServiceClient(base_url=url, api_key=KEY)

    def run(self, **options: Any) -> Any:
        options = {"rank": 8, "seed": 1, **options}
        return self.client.create_lora_training_client(base_model=str(self.model), **options).result()

    def file(self, path: str) -> Path:
        """Where a `tinker://` path lies."""
        return self.directory / path.removeprefix("tinker://")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    place = tmp_path_factory.mktemp("tinker")
    write_proof(place)
    with tinker_server(place / "model", place / "saved") as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_TELEMETRY", "0")
        yield Served(url, place / "model", place / "saved")


def datum(tokens: Sequence[int], *, prompt: int = 1, **inputs: Sequence[float]) -> Any:
    """A sequence of which the tokens after the prompt are learned from, by inputs of those tokens."""
    before = [0.0] * (prompt - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={
            "target_tokens": np.array(tokens[1:]),
            **{name: np.array([*before, *values], dtype=np.float32) for name, values in inputs.items()},
        },
    )


SAMPLED = datum([2, 3, 4], logprobs=[-1, -1], advantages=[1, 1])
GSPO = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
DATA = [datum([2, 3, 4, 5, 1], weights=[1, 1, 1, 1]), datum([5, 4, 2], weights=[1, 0.5])]


def learned(run: Any, data: Sequence[Any], steps: int) -> list[list[float]]:
    """The logprobs of the data before each step of supervised learning."""
    found = []
    for _ in range(steps):
        passed, stepped = run.forward_backward(data, "cross_entropy"), run.optim_step(ADAM)
        found.append([value for one in passed.result().loss_fn_outputs for value in one["logprobs"].data])
        stepped.result()
    return found


def rewards_of(served: Served, letter: str, *, steps: int, loss: str) -> list[float]:
    """The mean share of the letter in what a run samples, by step, as it learns to say nothing else."""
    run = served.run()
    wanted, prompts = AutoTokenizer.from_pretrained(served.model).encode(letter)[0], [[2, 3], [4, 5], [3, 3], [5, 2]]
    means = []
    for step in range(steps):
        sampler = run.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=6, seed=step)
        asked = [sampler.sample(types.ModelInput.from_ints(prompt), 8, params) for prompt in prompts]
        data, rewards = [], []
        for prompt, future in zip(prompts, asked, strict=True):
            sequences = future.result().sequences
            group = [sequence.tokens.count(wanted) / 6 for sequence in sequences]
            rewards += group
            for sequence, reward in zip(sequences, group, strict=True):
                advantages = [reward - fmean(group)] * len(sequence.tokens)
                tokens = [*prompt, *sequence.tokens]
                data.append(datum(tokens, prompt=2, logprobs=sequence.logprobs, advantages=advantages))
        run.forward_backward(data, loss)
        run.optim_step(ADAM).result()
        means.append(fmean(rewards))
    return means


def test_two_runs_learn_at_once_while_a_third_fails(served: Served):
    def spoilt() -> list[str]:
        run, said = served.run(), []
        for _ in range(3):
            passed = run.forward_backward(DATA, "cross_entropy")
            stepped = run.optim_step(types.AdamParams(learning_rate=1e30))
            for future in (passed, stepped):
                try:
                    future.result()
                except tinker.RequestFailedError as error:
                    assert error.category == "user"
                    said.append(str(error))
        return said

    with ThreadPoolExecutor() as pool:
        a = pool.submit(rewards_of, served, "a", steps=10, loss="importance_sampling")
        b = pool.submit(rewards_of, served, "b", steps=10, loss="cispo")
        failures = pool.submit(spoilt).result()
        for means in (a.result(), b.result()):
            assert fmean(means[-2:]) - fmean(means[:2]) > 0.3, means
    assert "the cross_entropy of this run is not finite" in failures[0]
    assert "the step is refused, because a forward_backward before it failed" in failures[1]
    assert len(failures) == 4


def test_what_fails_in_one_run_changes_no_bit_of_another(served: Served):
    alone = learned(served.run(), DATA, 3)
    run, other = served.run(), served.run()
    found = []
    for _ in range(3):
        found += learned(run, DATA, 1)
        other.forward_backward(DATA, "cross_entropy")
        other.optim_step(types.AdamParams(learning_rate=1e30))
        with pytest.raises(tinker.RequestFailedError):
            other.forward_backward([datum([2, 99])], "cross_entropy").result()
    assert found == alone
    assert fmean(alone[2]) > fmean(alone[0])


def test_a_saved_state_goes_on_bit_by_bit(served: Served):
    run = served.run()
    learned(run, DATA, 2)
    path = run.save_state("two", ttl_seconds=3600, user_metadata={"of": "the test"}).result().path
    there = served.client.create_training_client_from_state_with_optimizer(path).result()
    fresh = served.client.create_training_client_from_state(path).result()
    other = served.run(seed=7)
    other.load_state_with_optimizer(path).result()
    went_on = learned(run, DATA, 2)
    assert learned(there, DATA, 2) == went_on == learned(other, DATA, 2)
    without = learned(fresh, DATA, 2)
    assert without[0] == went_on[0] and without[1] != went_on[1]
    with pytest.raises(tinker.RequestFailedError, match="exists already"):
        run.save_state("two").result()
    with pytest.raises(tinker.RequestFailedError, match="shape differs"):
        served.run(rank=4).load_state(path).result()

    rest = tinker.RestClient(base_url=served.url, api_key=KEY)
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.lora_rank, info.is_lora) == (str(served.model), 8, True)
    (saved,) = rest.list_checkpoints(run.model_id).result().checkpoints
    assert (saved.tinker_path, saved.user_metadata) == (path, {"of": "the test"})
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert not served.file(path).exists()


@pytest.mark.parametrize("unembed", [True, False])
def test_peft_reads_what_is_saved(served: Served, unembed: bool):
    run = served.run(train_unembed=unembed)
    learned(run, DATA, 2)
    path = run.save_weights_for_sampler(f"for-peft-{unembed}").result().path
    found = run.forward(DATA, "cross_entropy").result().loss_fn_outputs
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(served.model), str(served.file(path)))
    for one, output in zip(DATA, found, strict=True):
        with torch.no_grad():
            log_p = model(input_ids=torch.tensor([one.model_input.to_ints()])).logits[0].log_softmax(-1)
        expected = log_p.gather(1, one.loss_fn_inputs["target_tokens"].to_torch()[:, None]).squeeze(1)
        assert torch.allclose(output["logprobs"].to_torch(), expected, atol=1e-5)
    head = [name for name, _ in model.named_parameters() if "lm_head.lora" in name]
    assert bool(head) is unembed


def test_logprobs_are_the_same_sampled_computed_and_trained(served: Served):
    run = served.run()
    learned(run, DATA, 3)
    path = run.save_weights_for_sampler("sampled").result().path
    trained = served.client.create_sampling_client(model_path=path).result()
    unnamed = run.save_weights_and_get_sampling_client().result()
    base = served.client.create_sampling_client(base_model=str(served.model)).result()
    prompt, params = [2, 3, 4], types.SamplingParams(max_tokens=8, seed=3)
    texts = []
    for sampler in (trained, unnamed, base):
        sampled = sampler.sample(
            types.ModelInput.from_ints(prompt), 2, params, include_prompt_logprobs=True, topk_prompt_logprobs=2
        ).result()
        assert len({sequence.sequence_id for sequence in sampled.sequences}) == 2
        for sequence in sampled.sequences:
            tokens = [*prompt, *sequence.tokens]
            computed = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
            assert computed[0] is None
            assert np.allclose(computed[3:], sequence.logprobs, atol=1e-5)
            assert np.allclose(computed[1:3], sampled.prompt_logprobs[1:], atol=1e-5)
            if sampler is not base:
                output = run.forward([datum(tokens)], "cross_entropy").result().loss_fn_outputs[0]
                assert np.allclose(output["logprobs"].data, computed[1:], atol=1e-5)
        best = [max(row, key=lambda pair: pair[1])[1] for row in sampled.topk_prompt_logprobs[1:]]
        assert all(most >= own - 1e-6 for most, own in zip(best, sampled.prompt_logprobs[1:], strict=True))
        texts.append([sequence.tokens for sequence in sampled.sequences])
    assert texts[0] == texts[1] != texts[2]
    assert trained.get_base_model() == str(served.model)
    last = base.compute_logprobs(types.ModelInput.from_ints(prompt), prompt_logprobs_last_n=1).result()
    assert last[:2] == [None, None] and last[2] is not None


def test_a_loss_of_the_client_is_the_same_as_the_server_s(served: Served):
    def negative(data: Sequence[Any], logprobs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return -sum(one.sum() for one in logprobs), {}  # type: ignore[return-value]

    theirs, ours = served.run(), served.run()
    data = [datum([2, 3, 4, 5])]
    theirs.forward_backward_custom(data, negative).result()
    ours.forward_backward(data, "cross_entropy").result()
    norms = [run.optim_step(ADAM).result().metrics["grad_norm"] for run in (theirs, ours)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    after = [run.forward(data, "cross_entropy").result().metrics["loss:sum"] for run in (theirs, ours)]
    assert after[0] == pytest.approx(after[1], rel=1e-4)
    with pytest.raises(tinker.RequestFailedError, match="the step has no gradient"):
        ours.optim_step(ADAM).result()


def test_dro_and_gspo_go_through_the_client(served: Served):
    """Two data in a request, of which each has a ratio of its own: the loss is that of the logprobs that come back."""
    run = served.run()
    sequences, old, advantages = [[2, 3, 4, 5], [4, 2, 3]], [[-1.0, -2.0, -1.5], [-2.0, -0.5]], [1.0, -2.0]

    def data(**more: float) -> list[Any]:
        return [
            datum(
                tokens, logprobs=q, advantages=[a] * len(q), **{name: [value] * len(q) for name, value in more.items()}
            )
            for tokens, q, a in zip(sequences, old, advantages, strict=True)
        ]

    dro = run.forward_backward(data(), "dro", {"beta": 0.1}).result()
    assert run.optim_step(ADAM).result().metrics["grad_norm"] > 0
    gspo = run.forward(data(sequence_ratio_mask=1.0), "gspo", GSPO).result()
    losses = {"dro": 0.0, "gspo": 0.0}
    for index, (q, a) in enumerate(zip(old, advantages, strict=True)):
        new = np.array(dro.loss_fn_outputs[index]["logprobs"].data)
        losses["dro"] -= float(np.sum(a * new - 0.05 * (new - q) ** 2))
        ratio = math.exp(np.mean(np.array(gspo.loss_fn_outputs[index]["logprobs"].data) - q))
        losses["gspo"] -= len(q) * min(ratio * a, min(max(ratio, 0.9), 1.1) * a)
    assert dro.metrics["loss:sum"] == pytest.approx(losses["dro"], rel=1e-5)
    assert gspo.metrics["loss:sum"] == pytest.approx(losses["gspo"], rel=1e-5)


IMAGE = types.Datum(
    model_input=types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png")]),
    loss_fn_inputs={"target_tokens": np.array([2])},
)
BAD_DATA: list[tuple[Any, str, dict[str, float], str]] = [
    (DATA[0], "stable_reinforce", {}, "'stable_reinforce' is not served here"),
    (SAMPLED, "dro", {}, "dro needs beta in loss_fn_config"),
    (SAMPLED, "gspo", GSPO, "has no 'sequence_ratio_mask' in loss_fn_inputs"),
    (
        datum([2, 3, 4], logprobs=[-1, -1], advantages=[1, 1], sequence_ratio_mask=[0, 0]),
        "gspo",
        GSPO,
        "a sequence_ratio_mask that marks no token",
    ),
    (DATA[0], "cross_entropy", {"clip_low_threshold": 1.0}, "does not take"),
    (DATA[0], "ppo", {}, "has no 'logprobs' in loss_fn_inputs"),
    (datum([2, 99], weights=[1]), "cross_entropy", {}, "outside of 0 to 5 in target_tokens"),
    (datum([2] * 40, weights=[1] * 39), "cross_entropy", {}, "has 39 tokens, and from 1 to 32 are allowed"),
    (datum([2, 3], weights=[np.nan]), "cross_entropy", {}, "values in weights that are not finite"),
    (datum([2, 3, 4], prompt=2, weights=[1, 1]), "cross_entropy", {}, "weights of shape"),
    (IMAGE, "cross_entropy", {}, "has an image or a sound"),
]


@pytest.fixture(scope="module")
def patient(served: Served) -> Any:
    """A run on which everything is tried that fails."""
    return served.run()


@pytest.mark.parametrize("data, loss, options, said", BAD_DATA, ids=[case[3] for case in BAD_DATA])
def test_bad_data_end_their_request(patient: Any, data: Any, loss: str, options: dict[str, float], said: str):
    with pytest.raises(tinker.RequestFailedError, match=re.escape(said)) as refused:
        patient.forward_backward([data], loss, options).result()
    assert refused.value.category == "user"
    with pytest.raises(tinker.RequestFailedError, match="the step is refused"):
        patient.optim_step(ADAM).result()
    learned(patient, DATA, 1)


def test_what_is_not_served_is_refused_in_words(served: Served, patient: Any):
    sampler = served.client.create_sampling_client(base_model=str(served.model)).result()
    prompt = types.ModelInput.from_ints([2])

    def sampled(tokens: int = 2, **params: Any) -> Any:
        return sampler.sample(types.ModelInput.from_ints([2] * tokens), 1, types.SamplingParams(**params)).result()

    cases: dict[str, Callable[[], Any]] = {
        "stop=[]": lambda: sampled(max_tokens=1, stop=[]),
        "the context holds 32": lambda: sampled(tokens=30, max_tokens=9),
        "temperature": lambda: sampled(max_tokens=1, temperature=-1.0),
        "topk_sample_logprobs is not served": lambda: sampler.sample(
            prompt, 1, types.SamplingParams(max_tokens=1), topk_sample_logprobs=2
        ).result(),
        "the base model 'other' is not served here": lambda: served.client.create_lora_training_client(
            base_model="other"
        ).result(),
        "the adapter's rank 0": lambda: served.run(rank=0),
        "not a valid name for a checkpoint": lambda: patient.save_state("..").result(),
        "not the path of a checkpoint": lambda: served.client.create_training_client_from_state(
            "tinker://x/y"
        ).result(),
        "there is no checkpoint": lambda: served.client.create_training_client_from_state(
            "tinker://x/weights/y"
        ).result(),
        "eps 0 is not above 0": lambda: [
            patient.forward_backward(DATA, "cross_entropy"),
            patient.optim_step(types.AdamParams(eps=0.0)).result(),
        ],
        "/api/v1/save_weights_external is not served here": lambda: served.run().save_weights_external("x").result(),
    }
    for said, attempt in cases.items():
        with pytest.raises(tinker.TinkerError, match=re.escape(said)):
            attempt()
    learned(patient, DATA, 1)


def test_the_code_of_the_page_runs(served: Served, monkeypatch: pytest.MonkeyPatch):
    page = (ROOT / "docs" / "tinker.md").read_text()
    monkeypatch.setenv("TINKER_BASE_URL", served.url)
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    names: dict[str, Any] = {}
    (code,) = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    exec(compile(code.replace("Qwen/Qwen2.5-0.5B-Instruct", str(served.model)), "docs/tinker.md", "exec"), names)
    assert names["run"].model_id in str(list(served.directory.glob("*/weights/after-three")))


def test_strangers_and_foreign_pages_are_kept_out(served: Served):
    def status(**headers: str) -> int:
        return httpx.get(f"{served.url}/api/v1/healthz", headers=headers, trust_env=False).status_code

    assert status(**{"x-api-key": KEY}) == 200
    assert status() == status(**{"x-api-key": "tml-other"}) == 401
    assert status(**{"x-api-key": KEY, "host": "evil.example"}) == 403


def test_bodies_counts_and_ranks_are_bounded(served: Served):
    zstandard = pytest.importorskip("zstandard")
    headers = {"x-api-key": KEY}

    def post(path: str, content: bytes, **more: str) -> httpx.Response:
        url = f"{served.url}/api/v1/{path}"
        return httpx.post(url, content=content, headers=headers | more, trust_env=False, timeout=60)

    packed = {"content-encoding": "zstd"}
    bomb = zstandard.compress(bytes(400 << 20))
    assert len(bomb) < 100_000
    for path in ("telemetry", "forward_backward"):
        assert post(path, bomb, **packed).status_code == 413
    assert post("telemetry", bytes(9 << 20)).status_code == 413
    assert post("telemetry", zstandard.compress(b"{}"), **packed).status_code == 200
    assert post("telemetry", b"not zstd", **packed).status_code == 422

    run = served.client.create_lora_training_client
    for rank in (257, 10**9):
        with pytest.raises(Exception, match=f"rank {rank} is not served: the largest is 256 "):
            run(base_model=str(served.model), rank=rank).result()
    body = {"base_model": str(served.model), "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]}}
    wanted = body | {"num_samples": 10**9, "sampling_params": {"max_tokens": 1}}
    reply = post("asample", json.dumps(wanted).encode())
    assert reply.status_code == 200 and len(reply.content) < 1 << 20
    failed = post("retrieve_future", json.dumps({"request_id": reply.json()["request_id"]}).encode()).json()
    assert "num_samples is 1000000000, and at most 1024 are served" in failed["error"]


def test_a_long_body_holds_up_no_other_client(served: Served):
    """Both limits are shares of the time that the long one takes, which a busy machine stretches too."""
    body = b'{"tags": [' + b"[]," * 2_600_000 + b"1]}"
    headers, waits = {"x-api-key": KEY}, []
    with ThreadPoolExecutor(1) as pool:
        started = time.monotonic()
        long = pool.submit(
            httpx.post, f"{served.url}/api/v1/create_session", content=body, headers=headers, timeout=LONG_S
        )
        while not long.done():
            asked = time.monotonic()
            httpx.get(f"{served.url}/api/v1/healthz", headers=headers, timeout=LONG_S)
            waits.append(time.monotonic() - asked)
        took_s = time.monotonic() - started
    assert long.result().status_code == 422
    assert len(waits) > 2 and max(waits) < 0.8 * took_s


def test_malformed_requests_are_the_client_s_fault(served: Served):
    chance = random.Random(3)
    wrong = [None, -1, 1.5, "x", "\ud800", [], {}, [None], {"a": 1}, 10**40, True, "tinker://../../etc", "../x"]
    keys = [
        "model_id", "session_id", "model_seq_id", "seq_id", "base_model", "lora_config", "optimizer_config",
        "path", "model_path", "tinker_path", "prompt", "num_samples", "sampling_params", "sampling_session_id",
        "request_id", "adam_params", "optim_params", "user_metadata", "kind",
    ]  # fmt: skip
    posts = [
        "create_model", "load_weights", "optim_step", "save_weights", "save_weights_for_sampler", "unload_model",
        "asample", "forward_backward", "retrieve_future", "get_info", "session_heartbeat",
        "create_sampling_session", "join_sampling_session", "weights_info", "telemetry", "create_session",
        "client/config",
    ]  # fmt: skip
    run_id = served.run().model_id
    with httpx.Client(base_url=f"{served.url}/api/v1/", headers={"x-api-key": KEY}, trust_env=False) as http:
        for path in posts:
            for number in range(15):
                body: Any = {key: chance.choice(wrong) for key in chance.sample(keys, 8)}
                if number % 3 == 0:
                    body["model_id"] = run_id
                content = [json.dumps(body).encode(), b"", b"{", b"[" * 50_000, b"\x0a\x05\xff"][max(0, number - 10)]
                reply = http.post(path, content=content)
                assert reply.status_code < 500, (path, content[:300], reply.text)
        for query in ("offset=x", "limit=-1", "offset=99999999999999999999", "limit=%C2%B2", "offset=1.5"):
            assert http.get(f"training_runs?{query}").status_code == 422
        for path in ("training_runs/..%2f..", "training_runs/x/checkpoints", "samplers/x"):
            assert http.get(path).status_code in (200, 404, 422)
        assert http.delete("training_runs/x/checkpoints/weights/..").status_code in (404, 405, 422)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("weights_info", {"tinker_path": "tinker://x/weights/" + "a" * 300}),
        ("weights_info", {"tinker_path": "tinker://" + "x" * 300 + "/weights/a"}),
        ("save_weights", {"path": "a" * 300}),
        ("save_weights", {"path": "a", "ttl_seconds": 10**15}),
        ("save_weights_for_sampler", {"path": "a", "ttl_seconds": 10**400}),
        ("asample", {"topk_prompt_logprobs": -4, "prompt_logprobs": True}),
        ("create_model", {"model_seq_id": 10**3000, "lora_config": {"rank": 1}}),
    ],
)
def test_values_that_no_disk_and_no_clock_takes_are_the_client_s_fault(served: Served, path: str, body: dict[str, Any]):
    """Neither now nor in the lists that come later."""
    run_id = served.run().model_id
    chunks = [{"type": "encoded_text", "tokens": [1]}]
    whole = {"base_model": str(served.model), "prompt": {"chunks": chunks}, "num_samples": 1, "sampling_params": {}}
    whole |= {"model_id": run_id, "session_id": run_id.partition(":")[0]}
    with httpx.Client(base_url=f"{served.url}/api/v1/", headers={"x-api-key": KEY}, trust_env=False) as http:
        reply = http.post(path, json=whole | body)
        if reply.status_code == 200:
            reply = http.post("retrieve_future", json={"request_id": reply.json()["request_id"]})
            assert reply.json()["category"] == "user", reply.text
        assert reply.status_code in (200, 422), reply.text
        assert http.get("training_runs").status_code == http.get(f"training_runs/{run_id}").status_code == 200


def test_a_request_that_is_sent_twice_is_one(served: Served):
    body = {"session_id": served.run().model_id.partition(":")[0], "model_seq_id": 999, "base_model": str(served.model)}

    def asked() -> str:
        url, sent = f"{served.url}/api/v1/create_model", body | {"lora_config": {"rank": 2}}
        return httpx.post(url, json=sent, headers={"x-api-key": KEY}, trust_env=False).json()["request_id"]

    assert asked() == asked()


def test_a_session_that_ends_takes_its_runs_along(served: Served):
    client = tinker.ServiceClient(base_url=served.url, api_key=KEY)
    run = client.create_lora_training_client(base_model=str(served.model), rank=2).result()
    path = run.save_state("kept").result().path
    rest = tinker.RestClient(base_url=served.url, api_key=KEY)
    assert run.model_id in [one.training_run_id for one in rest.list_training_runs(limit=100).result().training_runs]
    client.close("success").result()
    with pytest.raises(tinker.NotFoundError, match="there is no run"):
        rest.get_training_run(run.model_id).result()
    assert json.loads((served.file(path) / "tinker.json").read_text())["path"] == path
    assert served.client.create_training_client_from_state(path).result().get_info().lora_rank == 2


def test_what_cannot_be_adapted_is_refused():
    with pytest.raises(DataError, match="peft cannot attach this adapter"):
        AdapterBank(tiny_model("mamba"), name="tiny").add(LoraShape(rank=2, seed=0))
    with pytest.raises(DataError, match="adapters of a model's experts"):
        AdapterBank(tiny_model("qwen3_moe"), name="tiny").add(LoraShape(rank=2, seed=0))
