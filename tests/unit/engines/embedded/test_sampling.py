"""Processors against transformers' own, draws against the exact distribution."""

from __future__ import annotations

import string

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lachesis.common.errors import EngineError
from lachesis.common.types import Completion, GenerationRequest, SamplingParams
from lachesis.engines.embedded.sampling import (
    RowSampling,
    draw_uniforms,
    process_logits,
    sample,
)
from tests.tiny import EOS_ID, tiny_model, tiny_tokenizer
from tests.unit.engines.embedded.test_engine import make, soon

ROWS, VOCAB = 6, 23


def random_logits(*, seed: int = 0, rows: int = ROWS) -> torch.Tensor:
    return 2.0 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def process(logits: torch.Tensor, *params: SamplingParams, seen: torch.Tensor | None = None) -> torch.Tensor:
    rows = params * logits.shape[0] if len(params) == 1 else params
    return process_logits(logits, RowSampling.of(rows, vocab_size=logits.shape[1], device="cpu"), seen=seen)


def seen_of(ids: torch.Tensor) -> torch.Tensor:
    return torch.zeros(ids.shape[0], VOCAB, dtype=torch.bool).scatter(1, ids, True)


NO_IDS = torch.zeros(ROWS, 0, dtype=torch.int64)


@pytest.mark.parametrize(
    ("params", "processors"),
    [
        (SamplingParams(1), []),
        (SamplingParams(1, temperature=0.6), [TemperatureLogitsWarper(0.6)]),
        (SamplingParams(1, min_p=0.2), [MinPLogitsWarper(0.2)]),
        (SamplingParams(1, top_k=4), [TopKLogitsWarper(4)]),
        (SamplingParams(1, top_p=0.7), [TopPLogitsWarper(0.7)]),
        (
            SamplingParams(1, temperature=1.7, min_p=0.02, top_k=9, top_p=0.8),
            [TemperatureLogitsWarper(1.7), MinPLogitsWarper(0.02), TopKLogitsWarper(9), TopPLogitsWarper(0.8)],
        ),
    ],
)
def test_each_processor_and_their_order_agree_with_transformers(params, processors):
    logits = random_logits()
    expected = logits
    for processor in processors:
        expected = processor(NO_IDS, expected)
    torch.testing.assert_close(process(logits, params), expected.log_softmax(-1))


def test_repetition_penalty_agrees_with_transformers_on_repeated_tokens():
    logits = random_logits()
    ids = torch.tensor([[1, 1, 5], [2, 3, 2], [0, 22, 7], [4, 4, 4], [9, 8, 7], [11, 12, 13]])
    expected = RepetitionPenaltyLogitsProcessor(1.4)(ids, logits).log_softmax(-1)
    actual = process(logits, SamplingParams(1, repetition_penalty=1.4), seen=seen_of(ids))
    torch.testing.assert_close(actual, expected)


def test_the_penalty_comes_before_the_temperature():
    logits = torch.tensor([[3.0, -2.0, 0.5]])
    actual = process(
        logits,
        SamplingParams(1, temperature=0.5, repetition_penalty=2.0),
        seen=torch.tensor([[True, True, False]]),
    )
    torch.testing.assert_close(actual, torch.tensor([[3.0, -8.0, 1.0]]).log_softmax(-1))


def test_rows_with_different_parameters_do_not_touch_each_other():
    params = [
        SamplingParams(1),
        SamplingParams(1, temperature=0.3),
        SamplingParams(1, top_k=3),
        SamplingParams(1, top_p=0.5),
        SamplingParams(1, min_p=0.3),
        SamplingParams(1, repetition_penalty=1.5, top_k=5, top_p=0.9),
    ]
    logits, seen = random_logits(), seen_of(torch.tensor([[1], [2], [3], [4], [5], [6]]))
    together = process(logits, *params, seen=seen)
    for row, row_params in enumerate(params):
        alone = process(logits[row : row + 1], row_params, seen=seen[row : row + 1])
        torch.testing.assert_close(together[row], alone[0])


def test_take_moves_parameters_with_their_rows():
    params = [SamplingParams(1, temperature=t, top_k=k) for t, k in ((0.5, 2), (1.0, 0), (2.0, 7))]
    sampling = RowSampling.of(params, vocab_size=VOCAB, device="cpu")
    rows = torch.tensor([2, 0, 0])
    logits = random_logits(rows=3)
    torch.testing.assert_close(
        process_logits(logits, sampling.take(rows)), process(logits, *(params[i] for i in rows.tolist()))
    )


def test_top_p_keeps_the_token_that_crosses_it_and_always_one():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    kept = {
        top_p: process(logits, SamplingParams(1, top_p=top_p)).isfinite().sum().item()
        for top_p in (1e-6, 0.49, 0.51, 0.79, 0.81, 0.96, 1.0)
    }
    assert kept == {1e-6: 1, 0.49: 1, 0.51: 2, 0.79: 2, 0.81: 3, 0.96: 4, 1.0: 4}


def test_top_k_keeps_ties_and_may_exceed_the_vocabulary():
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    assert process(logits, SamplingParams(1, top_k=1)).isfinite().tolist() == [[False, True, True, False]]
    assert process(logits, SamplingParams(1, top_k=99)).isfinite().all()


def test_a_greedy_row_has_the_logprobs_of_temperature_one_and_cuts_nothing():
    logits = random_logits(rows=1)
    greedy = process(logits, SamplingParams(1, temperature=0.0, top_k=2, top_p=0.3, min_p=0.5))
    torch.testing.assert_close(greedy, logits.log_softmax(-1))


def test_bfloat16_logits_are_processed_in_float32():
    logits = random_logits().bfloat16()
    for temperature in (0.7, 1.0):
        actual = process(logits, SamplingParams(1, temperature=temperature))
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, (logits.float() / temperature).log_softmax(-1))


def test_draws_follow_the_distribution_and_never_take_a_cut_token():
    draws = 200_000
    probs = torch.tensor([0.0, 0.3, 0.0, 0.05, 0.2, 0.001, 0.449, 0.0])
    uniforms = torch.from_numpy(draw_uniforms([(7, 0)], draws)[0])
    tokens, logprobs = sample(probs.log().expand(draws, -1), uniforms)
    counts = torch.bincount(tokens, minlength=len(probs)).double()
    assert counts[probs == 0].sum() == 0
    expected = probs[probs > 0].double() * draws
    chi_square = ((counts[probs > 0] - expected) ** 2 / expected).sum().item()
    assert chi_square < 23.5, "the 0.9999 quantile of chi-square with 4 degrees of freedom"
    torch.testing.assert_close(logprobs, probs.log()[tokens])


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-24, 1.0])  # 1.0: as if rounding had made it so
@pytest.mark.parametrize("support", [[0], [3], [7], [2, 5], [0, 7]])
def test_the_ends_of_the_distribution_give_tokens_of_positive_probability(uniform, support):
    logprobs = torch.full((1, 8), float("-inf"))
    logprobs[0, support] = -float(np.log(len(support)))
    tokens, _ = sample(logprobs, torch.tensor([uniform]))
    assert tokens.item() in support


def test_a_uniform_of_zero_takes_the_first_possible_token():
    logprobs = torch.tensor([[0.0, 0.3, 0.7]]).log()
    assert sample(logprobs, torch.tensor([0.0]))[0].tolist() == [1]


def test_a_sum_below_one_leaves_no_gap_at_the_end():
    # float32 probabilities of 50,000 tokens do not sum to 1 exactly, and the last ones are impossible here.
    logits = torch.zeros(1, 50_000)
    logits[0, -1000:] = float("-inf")
    tokens, logprobs = sample(logits.log_softmax(-1), torch.tensor([1 - 2**-24]))
    assert tokens.item() < 49_000 and logprobs.isfinite().all()


def test_greedy_rows_take_the_likeliest_token_beside_rows_that_draw():
    logprobs = torch.tensor([[0.6, 0.4], [0.6, 0.4]]).log()
    tokens, _ = sample(logprobs, torch.tensor([0.9, 0.9]), greedy=torch.tensor([True, False]))
    assert tokens.tolist() == [0, 1]
    assert sample(logprobs, None)[0].tolist() == [0, 0]


def test_uniforms_are_those_of_numpys_philox_under_the_key():
    keys = [(3, 0), (3, 1), (2**63, 5), (-1, 2)]
    uniforms = draw_uniforms(keys, 9)
    for row, (seed, completion) in enumerate(keys):
        key = np.array([seed % 2**64, completion], dtype=np.uint64)
        own = np.random.Generator(np.random.Philox(key=key)).random(9, dtype=np.float32)
        np.testing.assert_array_equal(uniforms[row], own)


def test_uniforms_depend_on_their_key_alone():
    many = draw_uniforms([(1, 0), (2, 0), (1, 1)], 50)
    np.testing.assert_array_equal(draw_uniforms([(1, 1)], 20)[0], many[2, :20])
    assert len(np.unique(many)) > 145, "streams of different keys must differ"
    assert many.min() >= 0 and many.max() < 1


TOKENIZER = tiny_tokenizer()
PROMPT = tuple(TOKENIZER("say")["input_ids"])


class TestEngine:
    @pytest.fixture(scope="class")
    def engine(self):
        return make(tiny_model("qwen2"), decode=TOKENIZER.decode)

    def generate(self, engine, *params: SamplingParams, n: int = 6) -> list[list[Completion]]:
        requests = [GenerationRequest(PROMPT, p, n=n, seed=i) for i, p in enumerate(params)]
        return engine.generate(requests, deadline=soon())

    def texts(self, completions: list[Completion]) -> list[str]:
        return [TOKENIZER.decode(c.token_ids, skip_special_tokens=True) for c in completions]

    def test_no_end_before_the_least_length(self, engine):
        ends = tuple(TOKENIZER(string.ascii_lowercase)["input_ids"])
        params = SamplingParams(9, stop_token_ids=ends, stop=("A", "B", "1"), min_tokens=5)
        (completions,) = self.generate(engine, params, n=24)
        assert min(len(c.token_ids) for c in completions) > 5 - 1
        assert all(not set(c.token_ids[:5]) & {*ends, EOS_ID} for c in completions)
        (sooner,) = self.generate(engine, SamplingParams(9, stop_token_ids=ends, stop=("A", "B", "1")), n=24)
        assert min(len(c.token_ids) for c in sooner) < 5

    def test_penalties_are_on_the_counts_of_the_completion(self, engine):
        """The second token's distribution is the model's own but for the first token's penalty."""
        penalties = SamplingParams(2, presence_penalty=1.5, frequency_penalty=0.5)
        (completions,) = self.generate(engine, penalties, n=12)
        pairs = [one for one in completions if len(one.token_ids) == 2]
        assert pairs
        for one in pairs:
            first, second = one.token_ids
            logits = torch.tensor(self.logits_after(engine, (*PROMPT, first)))
            logits[first] -= 2.0
            assert one.logprobs[1] == pytest.approx(float(logits.log_softmax(-1)[second]), abs=1e-4)

    def logits_after(self, engine, prompt: tuple[int, ...]) -> list[float]:
        with engine.exclusive() as model, torch.no_grad():
            return model(torch.tensor([prompt])).logits[0, -1].tolist()

    def test_a_regular_expression_is_refused(self, engine):
        with pytest.raises(EngineError, match="regular expression, which the embedded engine does not support"):
            self.generate(engine, SamplingParams(2, guided_regex="a"))

    def test_a_least_length_above_the_longest_is_refused(self, engine):
        with pytest.raises(EngineError, match=r"min_tokens = 3 \(must be from 0 to max_tokens\)"):
            self.generate(engine, SamplingParams(2, min_tokens=3))
