"""Completions by a regular expression, with penalties and a least length, by the embedded engine."""

from __future__ import annotations

import math
import re
import string

import numpy as np
import pytest
import torch

from lachesis.common.errors import EngineError
from lachesis.common.types import Completion, GenerationRequest, SamplingParams
from lachesis.engines.embedded.guided import RegexGuide, token_pieces
from tests.tiny import EOS_ID, PAD_ID, tiny_model, tiny_tokenizer
from tests.unit.engines.embedded.test_engine import make, soon

PIECES = ["", "<eos>", "a", "b", "ab", "ba", "1", "22", "\ufffd", "é"]
END = 1
TOKENIZER = tiny_tokenizer()
PROMPT = tuple(TOKENIZER("say")["input_ids"])


def guide(pattern: str) -> RegexGuide:
    return RegexGuide(pattern, pieces=PIECES, end_token_ids=[END])


def allowed(pattern: str, text: str) -> set[str]:
    return {PIECES[i] for i in np.flatnonzero(guide(pattern).allowed(text))}


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        ("ab+", "", {"a", "ab"}),
        ("ab+", "a", {"b"}),
        ("ab+", "ab", {"b", "<eos>"}),
        ("[0-9]{2}", "", {"1", "22"}),
        ("[0-9]{2}", "1", {"1"}),
        ("[0-9]{2}", "11", {"<eos>"}),
        (".", "", {"a", "b", "1", "é"}),
        ("(a|)", "", {"a", "<eos>"}),
    ],
)
def test_what_may_come_next(pattern: str, text: str, expected: set[str]):
    assert allowed(pattern, text) == expected


def test_what_no_token_can_spell_is_an_error_that_says_where():
    with pytest.raises(EngineError, match=r"after 'a' no token leads to a match of 'ax'.*guided_regex"):
        guide("ax").allowed("a")


def test_a_pattern_that_is_none_is_an_error():
    with pytest.raises(EngineError, match=r"'\(a' cannot be read: .*guided_regex"):
        guide("(a")


def test_tokens_keep_the_space_that_they_begin_with():
    words = {3: " a", 4: " bc", 5: "<x>", 6: "d"}

    def decode(token_ids):
        return "".join(words.get(i, "") for i in token_ids).removeprefix(" ")

    assert token_pieces(decode, vocab_size=7, special_token_ids=[5]) == ["", "", "", " a", " bc", "", "d"]


class TestEngine:
    @pytest.fixture(scope="class")
    def engine(self):
        special = [PAD_ID, 1, EOS_ID]
        return make(tiny_model("qwen2"), decode=TOKENIZER.decode, special_token_ids=special)

    def generate(self, engine, *params: SamplingParams, n: int = 6) -> list[list[Completion]]:
        requests = [GenerationRequest(PROMPT, p, n=n, seed=i) for i, p in enumerate(params)]
        return engine.generate(requests, deadline=soon())

    def texts(self, completions: list[Completion]) -> list[str]:
        return [TOKENIZER.decode(c.token_ids, skip_special_tokens=True) for c in completions]

    @pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
    def test_completions_match_whatever_else_is_in_the_batch(self, engine, temperature: float):
        patterns = ["[0-9]{3}-(ab|cd)", "x+", None]
        params = [SamplingParams(12, temperature=temperature, guided_regex=pattern) for pattern in patterns]
        number, letters, free = self.generate(engine, *params)
        assert all(re.fullmatch(patterns[0], text) for text in self.texts(number))
        assert {c.finish_reason for c in number} == {"stop"} and number[0].token_ids[-1] == EOS_ID
        assert all(re.fullmatch("x+", text) for text in self.texts(letters))
        alone = self.generate(engine, params[0], params[1])
        assert [c.token_ids for c in alone[0]] == [c.token_ids for c in number]
        assert not all(set(text) <= set("x") for text in self.texts(free))

    def test_logprobs_are_of_what_was_allowed(self, engine):
        (completions,) = self.generate(engine, SamplingParams(4, guided_regex="ab[cd]"))
        for completion in completions:
            assert [lp == pytest.approx(0.0, abs=1e-6) for lp in completion.logprobs] == [True, True, False, True]
        both = {c.token_ids[2]: math.exp(c.logprobs[2]) for c in completions}
        assert len(both) == 1 or sum(both.values()) == pytest.approx(1.0, abs=1e-5)

    def test_no_end_before_the_least_length(self, engine):
        ends = tuple(TOKENIZER(string.ascii_lowercase)["input_ids"])
        params = SamplingParams(9, stop_token_ids=ends, stop=("A", "B", "1"), min_tokens=5)
        (completions,) = self.generate(engine, params, n=24)
        assert min(len(c.token_ids) for c in completions) > 5 - 1
        assert all(not set(c.token_ids[:5]) & {*ends, EOS_ID} for c in completions)
        (sooner,) = self.generate(engine, SamplingParams(9, stop_token_ids=ends, stop=("A", "B", "1")), n=24)
        assert min(len(c.token_ids) for c in sooner) < 5

    def test_penalties_are_on_the_counts_of_the_completion(self, engine):
        """Greedy, so that the second token's distribution is the model's own but for the first token's penalty."""
        plain, punished = self.generate(
            engine,
            SamplingParams(2, temperature=1.0, guided_regex="[ab]{2}"),
            SamplingParams(2, temperature=1.0, guided_regex="[ab]{2}", presence_penalty=1.5, frequency_penalty=0.5),
            n=40,
        )

        def odds(completions: list[Completion], first: str) -> dict[str, float]:
            seen = zip(self.texts(completions), completions, strict=True)
            return {text: c.logprobs[1] for text, c in seen if text[0] == first}

        for first, other in ("ab", "ba"):
            before, after = odds(plain, first), odds(punished, first)
            if len(before) == len(after) == 2:
                moved = after[first + first] - after[first + other] - before[first + first] + before[first + other]
                assert moved == pytest.approx(-2.0, abs=1e-4)
                return
        pytest.fail("too few samples to compare")

    def test_it_needs_a_decoder(self):
        engine = make(tiny_model("qwen2"))
        with pytest.raises(EngineError, match="regular expression, but this engine has no tokenizer"):
            self.generate(engine, SamplingParams(2, guided_regex="a"))

    def test_a_least_length_above_the_longest_is_refused(self, engine):
        with pytest.raises(EngineError, match="min_tokens = 3, not from 0 to max_tokens"):
            self.generate(engine, SamplingParams(2, min_tokens=3))


def test_the_shape_of_what_is_banned_follows_the_logits_and_not_the_tokenizer():
    """Models pad their vocabulary: such tokens have no text, and are never taken."""
    model = tiny_model("qwen2", vocab_size=len(TOKENIZER) + 29)
    engine = make(model, decode=TOKENIZER.decode, special_token_ids=[PAD_ID, 1, EOS_ID])
    request = GenerationRequest(PROMPT, SamplingParams(3, guided_regex=".{3}", temperature=3.0), n=64)
    (completions,) = engine.generate([request], deadline=soon())
    taken = torch.tensor([c.token_ids for c in completions])
    assert int(taken.max()) < len(TOKENIZER)
