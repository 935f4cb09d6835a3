"""The embedded engine against full forward passes of the same model, computed one sequence at a time."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lachesis.common.deadline import Deadline
from lachesis.common.errors import DeadlineExceeded, EngineError
from lachesis.common.types import Completion, GenerationRequest, SamplingParams
from lachesis.engines.embedded.engine import EmbeddedEngine
from tests.tiny import EOS_ID, PAD_ID, tiny_model
from tests.waiting import LONG_S

PROMPTS = [(5, 17, 60, 33, 8), (70, 71), (9, 9, 9, 50, 51, 52, 53, 54), (21, 80, 44, 6, 7)]
MIXTURE = [
    SamplingParams(9, temperature=0.7),
    SamplingParams(4, temperature=1.3, top_k=7, repetition_penalty=1.3),
    SamplingParams(7, top_p=0.8, min_p=0.05),
    SamplingParams(9, temperature=0.0),
]


def make(model, **overrides) -> EmbeddedEngine:
    settings = {"eos_token_ids": [EOS_ID], "pad_token_id": PAD_ID, "max_batch_size": 64, "max_context": 100}
    return EmbeddedEngine(model, **(settings | overrides))


def soon() -> Deadline:
    return Deadline("test: generation", 60.0)


def mixture(*, n: int = 3) -> list[GenerationRequest]:
    pairs = zip(PROMPTS, MIXTURE, strict=True)
    return [GenerationRequest(ids, params, n=n, seed=10 + i) for i, (ids, params) in enumerate(pairs)]


def tokens_of(results: Sequence[Sequence[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[completion.token_ids for completion in group] for group in results]


def processors(params: SamplingParams) -> LogitsProcessorList:
    """transformers' own processors, in vLLM's order."""
    chain = LogitsProcessorList()
    if params.repetition_penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if not params.greedy:
        chain.append(TemperatureLogitsWarper(params.temperature))
        if params.min_p:
            chain.append(MinPLogitsWarper(params.min_p))
        if params.top_k:
            chain.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            chain.append(TopPLogitsWarper(params.top_p))
    return chain


@torch.no_grad()
def expected_logprobs(model, request: GenerationRequest, token_ids: tuple[int, ...]) -> torch.Tensor:
    """Logprobs of a completion from one forward pass without cache, padding or batch."""
    chain, start = processors(request.params), len(request.prompt_ids)
    ids = torch.tensor([request.prompt_ids + token_ids])
    logits = model(input_ids=ids, use_cache=False).logits
    picked = []
    for i, token in enumerate(token_ids, start=start):
        scores = chain(ids[:, :i], logits[:, i - 1].float())
        picked.append(scores.log_softmax(-1)[0, token])
    return torch.stack(picked)


def assert_exact(model, requests, results, *, tolerance: float = 1e-4) -> None:
    for request, group in zip(requests, results, strict=True):
        assert len(group) == request.n
        for completion in group:
            expected = expected_logprobs(model, request, completion.token_ids)
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gpt2", "gemma2", "mamba", "openai-gpt"])
def test_logprobs_are_those_of_the_distribution_sampled_from(architecture):
    model = tiny_model(architecture)
    # Tokens that end sequences early, so that rows leave the batch at different steps.
    results = make(model, eos_token_ids=range(2, 12)).generate(mixture(), deadline=soon())
    assert_exact(model, mixture(), results)
    assert len({len(completion.token_ids) for group in results for completion in group}) > 2


@pytest.mark.parametrize("params", [SamplingParams(6, repetition_penalty=1.8), *MIXTURE])
def test_logprobs_of_each_processor_alone(params):
    model = tiny_model("qwen2")
    requests = [GenerationRequest(ids, params, n=4, seed=i) for i, ids in enumerate(PROMPTS)]
    assert_exact(model, requests, make(model).generate(requests, deadline=soon()))


def test_bfloat16_weights_give_float32_logprobs_close_to_a_full_forward_pass():
    model = tiny_model("llama").bfloat16()
    requests = mixture()[:1]
    results = make(model).generate(requests, deadline=soon())
    assert_exact(model, requests, results, tolerance=0.15)
    logprobs = torch.tensor(results[0][0].logprobs)
    assert not torch.equal(logprobs, logprobs.bfloat16().float())


def test_sequences_follow_the_models_distribution():
    model, draws, vocab = tiny_model("qwen2", vocab_size=5, seed=3), 4000, 5
    request = GenerationRequest((3, 4, 3), SamplingParams(2, temperature=1.5), n=draws, seed=1)
    engine = make(model, eos_token_ids=[], max_batch_size=draws)
    counts = Counter(c.token_ids for c in engine.generate([request], deadline=soon())[0])
    pairs = [(a, b) for a in range(vocab) for b in range(vocab)]
    probs = torch.stack([expected_logprobs(model, request, pair).sum().exp() for pair in pairs]).double()
    torch.testing.assert_close(probs.sum().item(), 1.0, rtol=1e-5, atol=0)
    observed = torch.tensor([counts[pair] for pair in pairs], dtype=torch.float64)
    # Rare pairs go together: chi-square wants at least 5 expected in each class.
    common = probs * draws >= 5
    observed = torch.cat([observed[common], observed[~common].sum()[None]])
    expected = torch.cat([probs[common], probs[~common].sum()[None]]) * draws
    assert common.sum() >= 6
    chi_square = ((observed - expected) ** 2 / expected.clamp(min=1e-9)).sum().item()
    assert chi_square < 58.0, "the 0.9999 quantile of chi-square with 24 degrees of freedom"


def test_equal_seeds_give_equal_completions_whatever_else_is_in_the_batch():
    model, requests = tiny_model("qwen2"), mixture(n=4)
    engine = make(model)
    together = tokens_of(engine.generate(requests, deadline=soon()))
    alone = [tokens_of(engine.generate([request], deadline=soon()))[0] for request in requests]
    backwards = tokens_of(engine.generate(requests[::-1], deadline=soon()))[::-1]
    in_pieces = tokens_of(make(model, max_batch_size=3).generate(requests, deadline=soon()))
    assert together == alone == backwards == in_pieces
    assert len(set(together[0])) > 1, "completions of one request must differ from one another"


def test_a_completion_depends_on_its_index_but_not_on_n():
    engine = make(tiny_model("qwen2"))
    few, many = (
        tokens_of(engine.generate([GenerationRequest((5, 6), MIXTURE[0], n=n, seed=3)], deadline=soon()))[0]
        for n in (2, 6)
    )
    assert many[:2] == few


def test_other_seeds_give_other_completions():
    engine = make(tiny_model("qwen2"))
    requests = [GenerationRequest((5, 6), SamplingParams(9), seed=seed) for seed in (1, 2)]
    first, second = tokens_of(engine.generate(requests, deadline=soon()))
    assert first != second


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gpt2", "gemma2", "mamba"])
def test_greedy_equals_transformers_generate(architecture):
    model = tiny_model(architecture)
    requests = [GenerationRequest(ids, SamplingParams(12, temperature=0.0)) for ids in PROMPTS]
    results = tokens_of(make(model).generate(requests, deadline=soon()))
    for ids, (completion,) in zip(PROMPTS, results, strict=True):
        expected = model.generate(
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=EOS_ID,
            pad_token_id=PAD_ID,
        )
        assert completion == tuple(expected[0, len(ids) :].tolist())


class Spy:
    """Notes the shape of everything that is fed to a model."""

    def __init__(self, model) -> None:
        self.shapes: list[tuple[int, int]] = []
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module, args, kwargs) -> None:
        self.shapes.append(tuple(kwargs["input_ids"].shape))


def test_each_prompt_is_computed_once_and_rows_leave_when_they_end():
    model = tiny_model("qwen2")
    spy = Spy(model)
    params = SamplingParams(40, temperature=1.5)
    requests = [GenerationRequest(ids, params, n=8, seed=i) for i, ids in enumerate(PROMPTS)]
    results = make(model, eos_token_ids=range(2, 17)).generate(requests, deadline=soon())
    lengths = [len(completion.token_ids) for group in results for completion in group]
    assert spy.shapes[0] == (len(PROMPTS), 8)
    assert all(width == 1 for _, width in spy.shapes[1:])
    assert len(spy.shapes) == max(lengths)
    for step, (rows, _) in enumerate(spy.shapes[1:], start=1):
        growing = sum(length > step for length in lengths)
        assert rows <= max(growing / (1 - 0.125), 1), f"step {step} computes rows that have ended"


def test_sequences_that_do_not_differ_share_one_row():
    model = tiny_model("qwen2")
    spy = Spy(model)
    request = GenerationRequest(PROMPTS[0], SamplingParams(6, temperature=0.0), n=8)
    (group,) = make(model, eos_token_ids=[]).generate([request], deadline=soon())
    assert {rows for rows, _ in spy.shapes} == {1}
    assert len(group) == 8 and len(set(group)) == 1


def test_more_sequences_than_fit_are_decoded_in_turn():
    model = tiny_model("qwen2")
    spy = Spy(model)
    params = SamplingParams(5, temperature=2.0)
    requests = [GenerationRequest(ids, params, n=5, seed=i) for i, ids in enumerate(PROMPTS)]
    results = make(model, max_batch_size=4).generate(requests, deadline=soon())
    assert [len(group) for group in results] == [5] * 4
    assert max(rows for rows, _ in spy.shapes) <= 4
    assert_exact(model, requests, results)


def test_end_and_stop_tokens_belong_to_the_completion():
    model = tiny_model("qwen2")
    free = make(model, eos_token_ids=[]).generate(
        [GenerationRequest((5, 6), SamplingParams(8), seed=1)], deadline=soon()
    )[0][0]
    third = free.token_ids[2]
    assert third not in free.token_ids[:2]
    by_eos = make(model, eos_token_ids=[third])
    by_stop = make(model, eos_token_ids=[])
    for engine, stop in ((by_eos, ()), (by_stop, (third,))):
        request = GenerationRequest((5, 6), SamplingParams(8, stop_token_ids=stop), seed=1)
        ((completion,),) = engine.generate([request], deadline=soon())
        assert completion.token_ids == free.token_ids[:3]
        assert completion.finish_reason == "stop"
        torch.testing.assert_close(completion.logprobs, free.logprobs[:3], rtol=1e-5, atol=1e-5)
    assert free.finish_reason == "length" and len(free.token_ids) == 8


def letters(ids: Sequence[int]) -> str:
    return "".join(chr(40 + i) for i in ids)


def test_a_stop_string_ends_the_completion_with_the_token_that_completed_it():
    engine = make(tiny_model("qwen2"), eos_token_ids=[], decode=letters)
    plain = GenerationRequest((5, 6), SamplingParams(8), seed=1)
    ((free,),) = engine.generate([plain], deadline=soon())
    stop = letters(free.token_ids[3:5])
    request = GenerationRequest((5, 6), SamplingParams(8, stop=("no such text", stop)), seed=1)
    (stopped,), (other,) = engine.generate([request, plain], deadline=soon())
    assert (stopped.token_ids, stopped.finish_reason) == (free.token_ids[:5], "stop")
    assert other.token_ids == free.token_ids


def test_the_cache_is_used_with_gradient_checkpointing_on_and_training_goes_on():
    model = tiny_model("qwen2", attention_dropout=0.5).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.config.use_cache = False
    spy = Spy(model)
    requests = mixture()
    results = make(model).generate(requests, deadline=soon())
    assert all(width == 1 for _, width in spy.shapes[1:])
    assert all(module.training for module in model.modules())
    model(input_ids=torch.tensor([PROMPTS[0]]), labels=torch.tensor([PROMPTS[0]])).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert_exact(model.eval(), requests, results)


def test_a_peft_model_generates_with_its_adapter():
    base = tiny_model("qwen2")
    plain = tokens_of(make(base).generate(mixture(), deadline=soon()))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(base, config)
    engine = make(model)
    results = engine.generate(mixture(), deadline=soon())
    assert_exact(model.eval(), mixture(), results)
    assert tokens_of(results) != plain
    with model.disable_adapter():
        assert tokens_of(engine.generate(mixture(), deadline=soon())) == plain


def test_new_weights_are_used_at_once():
    model = tiny_model("qwen2")
    engine = make(model)
    before = engine.canary(PROMPTS[0]).logprobs
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-1)
    assert engine.canary(PROMPTS[0]).logprobs != before
    results = engine.generate(mixture(), deadline=soon())
    assert_exact(model, mixture(), results)


@pytest.mark.parametrize("architecture", ["qwen2", "gemma2", "mamba", "recurrent_gemma"])
@pytest.mark.parametrize("length", [2, 3, 8])
def test_the_canary_reads_the_models_logprobs_through_the_cache(architecture, length):
    model, ids = tiny_model(architecture), PROMPTS[2][:length]
    reading = make(model, session_id="s").canary(ids)
    with torch.no_grad():
        logprobs = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
    expected = logprobs[:-1].gather(-1, torch.tensor(ids[1:])[:, None]).squeeze(-1)
    torch.testing.assert_close(torch.tensor(reading.logprobs), expected, rtol=1e-4, atol=1e-4)
    assert (reading.version, reading.session_id) == (0, "s")


def test_the_canary_decodes_what_it_does_not_prefill():
    model = tiny_model("qwen2")
    spy = Spy(model)
    make(model).canary(PROMPTS[2])
    assert spy.shapes == [(1, 4), (1, 3)]


def test_the_deadline_is_checked_while_decoding_and_the_engine_survives_it():
    model = tiny_model("qwen2").train()
    engine = make(model, eos_token_ids=[])
    spy = Spy(model)
    late = Deadline("feed: generation", 1e-9, "deadlines.generation_s")
    with pytest.raises(DeadlineExceeded, match=r"0 of 12 sequences finished.*deadlines\.generation_s"):
        engine.generate(mixture(), deadline=late)
    assert len(spy.shapes) == 1
    assert model.training
    assert len(engine.generate(mixture(), deadline=soon())) == 4


BAD_REQUESTS = {
    "empty": GenerationRequest((), SamplingParams(3)),
    "asks for 99 more": GenerationRequest((5, 6), SamplingParams(99)),
    "token ids outside": GenerationRequest((5, 99), SamplingParams(3)),
    "n = 0": GenerationRequest((5,), SamplingParams(3), n=0),
    "max_tokens = 0": GenerationRequest((5,), SamplingParams(0)),
    "temperature = -1": GenerationRequest((5,), SamplingParams(3, temperature=-1)),
    "top_p = 0": GenerationRequest((5,), SamplingParams(3, top_p=0)),
    "top_k = -2": GenerationRequest((5,), SamplingParams(3, top_k=-2)),
    "min_p = 2": GenerationRequest((5,), SamplingParams(3, min_p=2)),
    "repetition_penalty = 0": GenerationRequest((5,), SamplingParams(3, repetition_penalty=0)),
    "no tokenizer": GenerationRequest((5,), SamplingParams(3, stop=("x",))),
    "empty stop string": GenerationRequest((5,), SamplingParams(3, stop=("",))),
    "not a mixture of experts": GenerationRequest((5,), SamplingParams(3, routed_experts=True)),
}


@pytest.mark.parametrize("message", BAD_REQUESTS)
def test_a_request_that_cannot_be_sampled_is_refused_before_anything_is_computed(message):
    model = tiny_model("qwen2")
    spy = Spy(model)
    good = GenerationRequest((5, 6), SamplingParams(3))
    with pytest.raises(EngineError, match=message) as caught:
        make(model).generate([good, BAD_REQUESTS[message]], deadline=soon())
    assert "request 1" in caught.value.message and caught.value.remedy
    assert not spy.shapes


def test_weights_that_are_not_finite_are_an_error_and_no_token():
    model = tiny_model("qwen2").train()
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(EngineError, match="not finite at completion token 1"):
        make(model).generate(mixture(), deadline=soon())
    assert model.training


def run_beside(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Call in a thread of its own; what it returned or raised is in the list."""
    outcome: list[object] = []

    def target() -> None:
        try:
            outcome.append(call())
        except EngineError as error:
            outcome.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread, outcome


class Gate:
    """A decoder of text that stops generation at its third token until it is opened."""

    def __init__(self) -> None:
        self.calls = 0
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, ids: Sequence[int]) -> str:
        self.calls += 1
        if self.calls == 3:
            self.reached.set()
            assert self.opened.wait(LONG_S)
        return ""


def start_gated() -> tuple[EmbeddedEngine, Gate, threading.Thread, list[object]]:
    gate = Gate()
    engine = make(tiny_model("qwen2"), eos_token_ids=[], decode=gate)
    request = GenerationRequest((5, 6), SamplingParams(8, stop=("x",)), seed=1)
    thread, outcome = run_beside(lambda: engine.generate([request], deadline=soon()))
    assert gate.reached.wait(LONG_S)
    return engine, gate, thread, outcome


@pytest.mark.parametrize(("mode", "tokens", "reason"), [("drain", 8, "length"), ("abort", 3, "abort")])
def test_pausing_waits_for_a_running_call_or_cuts_it_short(mode, tokens, reason):
    engine, gate, generating, outcome = start_gated()
    pausing, _ = run_beside(lambda: engine.pause(mode=mode))
    pausing.join(0.1)
    assert pausing.is_alive(), "the call is not done, its weights must not change"
    assert engine.health().paused
    gate.opened.set()
    pausing.join(LONG_S)
    generating.join(LONG_S)
    (((completion,),),) = outcome
    assert (len(completion.token_ids), completion.finish_reason) == (tokens, reason)
    with pytest.raises(EngineError, match="paused"):
        engine.generate([], deadline=soon())
    engine.resume()
    assert engine.generate([], deadline=soon()) == []


def test_closing_ends_a_running_call_with_an_error():
    engine, gate, generating, outcome = start_gated()
    closing, _ = run_beside(engine.close)
    closing.join(0.1)
    gate.opened.set()
    generating.join(LONG_S)
    closing.join(LONG_S)
    assert isinstance(outcome[0], EngineError) and "closed during generation" in str(outcome[0])


def test_a_second_call_waits_no_longer_than_its_deadline():
    engine, gate, generating, _ = start_gated()
    with pytest.raises(DeadlineExceeded, match="another call is still generating"):
        engine.generate([], deadline=Deadline("test", 0.05))
    gate.opened.set()
    generating.join(LONG_S)


def test_versions_are_those_of_the_first_and_the_last_token():
    engine = make(tiny_model("qwen2"), eos_token_ids=[], decode=lambda ids: bump(len(ids)))

    def bump(length: int) -> str:
        if length == 2:
            engine.set_version(5)
        return ""

    engine.set_version(4)
    long = GenerationRequest((5, 6), SamplingParams(4, stop=("x",)))
    short = GenerationRequest((5, 6), SamplingParams(2))
    (first,), (second,) = engine.generate([long, short], deadline=soon())
    assert (first.versions, second.versions) == ((4, 5), (4, 4))
    ((third,),) = engine.generate([short], deadline=soon())
    assert third.versions == (5, 5)
    assert engine.canary([5, 6]).version == 5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_logprobs_on_a_gpu_in_bfloat16():
    model = tiny_model("qwen2").bfloat16().cuda()
    requests = mixture()
    results = make(model).generate(requests, deadline=soon())
    assert_exact(model.cpu(), requests, results, tolerance=0.15)
