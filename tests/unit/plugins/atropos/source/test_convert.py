"""From groups of the protocol to records: conventions, overrides, and what is not trained on."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from lachesis.common.group_codec import decode_group, encode_group
from lachesis.common.types import UNKNOWN_VERSIONS, Group, VersionSpan
from lachesis.config.schema import TeacherConfig
from lachesis.plugins.atropos.source.convert import Conversion, Unusable, convert_group

EOS = 9
CONVERSION = Conversion(
    decode=lambda rows: [" ".join(map(str, row)) for row in rows],
    vocab_size=50,
    max_length=8,
    eos_token_ids=frozenset({EOS}),
)


def group(**changes: Any) -> dict[str, Any]:
    """Two answers of different length to the prompt 1 2, as the protocol has them."""
    return {
        "tokens": [[1, 2, 3, 4, EOS], [1, 2, 5]],
        "masks": [[-100, -100, 3, 4, EOS], [-100, -100, 5]],
        "scores": [1.0, 0.0],
        "inference_logprobs": [[1.0, 1.0, -0.5, -0.25, -0.125], [1.0, 1.0, -2.0]],
        "env_id": 3,
        "overrides": None,
        "generation_params": None,
        "group_overrides": None,
        **changes,
    }


def convert(**changes: Any) -> Group:
    return convert_group(group(**changes), group_id="7-0", conversion=CONVERSION)


def test_the_prompt_is_what_comes_before_the_first_token_that_trains():
    first, second = convert().samples
    assert (first.prompt_ids, first.completion_ids, first.mask) == ((1, 2), (3, 4, EOS), (1, 1, 1))
    assert first.logprobs == (-0.5, -0.25, -0.125)
    assert (second.completion_ids, second.logprobs) == ((5,), (-2.0,))
    assert [sample.reward for sample in (first, second)] == [1.0, 0.0]
    assert first.rewards == (1.0,)
    assert first.advantage is None
    assert (first.text, convert().prompt.text) == ("3 4 9", "1 2")
    assert convert().prompt.id == "7-0"


def test_what_a_tool_said_is_masked_within_the_completion():
    masks = [[-100, -100, 3, -100, EOS], [-100, -100, 5]]
    logprobs = [[1.0, 1.0, -0.5, 1.0, -0.125], [1.0, 1.0, -2.0]]
    sample = convert(masks=masks, inference_logprobs=logprobs).samples[0]
    assert sample.mask == (1, 0, 1)
    assert sample.logprobs[0] == -0.5
    assert math.isnan(sample.logprobs[1])


def test_masks_of_0_and_1_mean_the_same():
    plain = convert()
    assert convert(masks=[[0, 0, 1, 1, 1], [0, 0, 1]]) == plain


def test_a_mask_that_equals_its_tokens_is_a_label_even_where_tokens_are_0_and_1():
    one = convert(tokens=[[1, 0, 1]], masks=[[1, 0, 1]], scores=[1.0], inference_logprobs=[[-1.0, -1.0, -1.0]])
    assert one.samples[0].prompt_ids == (1,)
    assert one.samples[0].mask == (1, 1)


def test_the_first_token_is_prompt_for_nothing_predicts_it():
    sample = convert(masks=[[1, 2, 3, 4, EOS], [-100, -100, 5]], inference_logprobs=None).samples[0]
    assert sample.prompt_ids == (1,)
    assert sample.completion_ids == (2, 3, 4, EOS)


@pytest.mark.parametrize("absent", [None, []])
def test_logprobs_that_are_not_there_are_unknown(absent: Any):
    assert all(math.isnan(value) for value in convert(inference_logprobs=absent).samples[0].logprobs)


def test_the_placeholder_where_the_mask_trains_is_no_logprob():
    with pytest.raises(Unusable, match=r"ref_logprobs at generated positions avg 0\.85 \(should be negative!\)"):
        convert(inference_logprobs=[[1.0, 1.0, 0.9, 0.8, 0.8], [1.0, 1.0, 0.9]])


def test_a_rounding_error_above_0_is_0():
    assert convert(inference_logprobs=[[1.0, 1.0, 1e-6, -1.0, -1.0], [1.0, 1.0, -2.0]]).samples[0].logprobs[0] == 0.0


def test_temperatures_count_from_the_most_special_to_the_most_general():
    chosen = {"overrides": [{"temperature": 0.5}, {}], "generation_params": {"temperature": 0.7}}
    assert [s.temperature for s in convert(**chosen).samples] == [0.5, 0.7]
    assert convert(group_overrides={"temperature": 0.9}).samples[0].temperature == 0.9
    assert convert().samples[0].temperature == 1.0


def test_an_advantage_set_to_zero_leaves_the_reward():
    first, second = convert(overrides=[{}, {"set_advantage_to_zero": True}]).samples
    assert (first.advantage, second.advantage, second.reward) == (None, 0.0, 0.0)


def test_advantages_of_the_environment_are_taken_as_they_are():
    constant = convert(advantages=[[0.0, 0.0, 2.0, 2.0, 2.0], [0.0, 0.0, -1.0]]).samples
    assert [(s.advantage, s.token_advantages) for s in constant] == [(2.0, None), (-1.0, None)]
    varying = convert(advantages=[[9.0, 9.0, 1.0, 2.0, 3.0], [0.0, 0.0, -1.0]]).samples[0]
    assert (varying.advantage, varying.token_advantages) == (0.0, (1.0, 2.0, 3.0))


def test_a_group_of_one_has_its_score_as_advantage():
    one = convert(tokens=[[1, 2, 5]], masks=[[-100, -100, 5]], scores=[0.5], inference_logprobs=[[1.0, 1.0, -2.0]])
    assert one.samples[0].advantage == 0.5


def test_a_teacher_adds_what_it_thinks_more_likely_than_the_sampler():
    ids = [[[1], [2], [3, 7], [8, 4], [EOS]], [[1], [2], [5]]]
    logprobs = [[[0.0], [0.0], [-0.1, -3.0], [-0.2, -1.25], [-0.125]], [[0.0], [0.0], [-1.0]]]
    first, second = convert(distill_token_ids=ids, distill_logprobs=logprobs).samples
    assert first.advantage is None
    assert first.token_advantages == pytest.approx((0.4, -1.0, 0.0))
    assert second.token_advantages == pytest.approx((1.0,))


class TestATeacherOfTheEnvironment:
    """``algorithm.teacher.kind: rollouts``: what it says is a teacher's word, and no advantage."""

    IDS: ClassVar = [[[1], [2], [3, 7], [8, 4], []], [[1], [2], [5]]]
    LOGPROBS: ClassVar = [[[0.0], [0.0], [-3.0, -0.1], [-0.2, -1.25], []], [[0.0], [0.0], [-1.0]]]

    @staticmethod
    def teacher(*, column: dict[str, Any] | None = None, **options: Any) -> Group:
        conversion = replace(CONVERSION, teacher=TeacherConfig(kind="rollouts", **options))
        return convert_group(group(**column or {}), group_id="7-0", conversion=conversion)

    def test_its_words_are_those_of_each_token(self):
        both = {"distill_token_ids": self.IDS, "distill_logprobs": self.LOGPROBS}
        first, _ = self.teacher(column=both).samples
        assert first.token_advantages is None and first.teacher is not None
        assert first.teacher.ids.tolist() == [[7, 3], [8, 4], [-1, -1]], "the likeliest first"
        assert first.teacher.sampled.tolist() == pytest.approx([-3.0, -1.25, math.nan], nan_ok=True)
        again = decode_group(json.loads(json.dumps(encode_group(self.teacher(column=both))))).samples[0].teacher
        assert again is not None and again.encoded() == first.teacher.encoded()
        (cut, _) = self.teacher(column=both, top_k=1).samples
        assert cut.teacher is not None and cut.teacher.ids.tolist() == [[7], [8], [-1]]

    def test_a_group_without_them_is_set_aside(self):
        with pytest.raises(Unusable, match="it has no distill_token_ids"):
            self.teacher()
        assert self.teacher(weights={"3": 0.0}).samples[0].teacher is None
        assert self.teacher(column={"group_overrides": {"skip_teacher_top_k": True}}).samples[0].teacher is None

    def test_the_sampled_token_has_to_be_there_where_it_alone_counts(self):
        both = {"distill_token_ids": [self.IDS[0], [[1], [2], [6]]], "distill_logprobs": self.LOGPROBS}
        assert self.teacher(column=both).samples[1].teacher is not None
        with pytest.raises(Unusable, match="lacks the sampled token 5"):
            self.teacher(column=both, estimate="sampled")


@pytest.mark.parametrize(
    ("ids", "reason"),
    [([[1], [2], [7]], "lacks the sampled token 5"), ([[1], [2], [999]], "the teacher's tokenizer is another")],
)
def test_a_teacher_with_another_tokenizer_is_noticed(ids: list[list[int]], reason: str):
    one = {"tokens": [[1, 2, 5]], "masks": [[-100, -100, 5]], "scores": [1.0], "inference_logprobs": [[1.0, 1.0, -2.0]]}
    with pytest.raises(Unusable, match=reason):
        convert(**one, distill_token_ids=[ids], distill_logprobs=[[[-1.0]] * 3])


def test_versions_and_endings_are_those_that_the_environment_names():
    named = [{"weight_version": {"first": 1, "last": 2}, "finish_reason": "length"}, {}]
    first, second = convert(overrides=named).samples
    assert (first.versions, first.finish_reason) == (VersionSpan(1, 2), "length")
    assert second.versions == UNKNOWN_VERSIONS, "the trainer's own would be a guess"
    # Unnamed: the first ends in the end-of-sequence token, the second was cut off.
    assert [s.finish_reason for s in convert().samples] == ["stop", "length"]


def test_rollouts_of_several_turns_are_not_cut_off():
    tokens, masks = [[3, 5, 6, 7, 8]] * 2, [[-100, 5, -100, 7, 8], [-100, 5, 6, -100, -100]]
    changed = convert(tokens=tokens, masks=masks, inference_logprobs=[[1.0, -0.5, -0.5, -0.5, -0.5]] * 2)
    assert [sample.finish_reason for sample in changed.samples] == ["stop", "stop"]


def test_a_group_may_have_an_id_of_its_own():
    assert convert(group_overrides={"group_id": "sum-17"}).prompt.id == "sum-17"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": []}, "tokens is empty"),
        ({"masks": [[-100, -100, 3]]}, "masks"),
        ({"masks": [[-100, -100, 3, 4], [-100, -100, 5]]}, r"masks\[0\] has 4 entries"),
        ({"masks": [[-100, -100, 8, 4, EOS], [-100, -100, 5]]}, "neither -100 nor the token 3"),
        ({"masks": [[-100] * 5, [-100] * 3]}, "no position of any sequence trains"),
        ({"scores": [1.0]}, "scores has 1 entry"),
        ({"scores": [1.0, math.nan]}, r"scores\[1\] is nan"),
        ({"scores": [1.0, None]}, "malformed"),
        ({"inference_logprobs": [[1.0, 1.0, -1.0]] * 2}, r"inference_logprobs\[0\]"),
        ({"tokens": [[1, 2, 3, 4, 60], [1, 2, 5]], "masks": [[-100, -100, 3, 4, 60], [-100, -100, 5]]}, "tokenizer"),
        ({"tokens": [[1] * 9, [1, 2, 5]], "masks": [[-100] * 8 + [1], [-100, -100, 5]], "inference_logprobs": None},
         "9 tokens, but the model takes 8"),
        ({"generation_params": {"temperature": -1}}, "temperature is -1"),
        ({"advantages": [[0.0, 0.0, math.inf, 1.0, 1.0], [0.0, 0.0, 1.0]]}, "not finite"),
        ({"generation_params": {"temperature": 1e-308}}, "temperature is 1e-308"),
        ({"advantages": [[0.0, 0.0, 1e38, 1.0, 1.0], [0.0, 0.0, 1.0]]}, r"advantages\[0\]\[2\] is 1e\+38, beyond"),
        ({"scores": [1.0, 1e308]}, r"scores\[1\] is 1e\+308, beyond"),
        ({"inference_logprobs": [[1.0, 1.0, -1e308, -1.0, -1.0], [1.0, 1.0, -2.0]]}, "which no sampled token has"),
        ({"tokens": None}, "malformed"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_on_says_why(changes: dict[str, Any], reason: str):
    with pytest.raises(Unusable, match=reason):
        convert(**changes)


def test_a_sequence_of_which_nothing_trains_still_shapes_the_baseline():
    masks = [[-100, -100, 3, 4, EOS], [-100, -100, -100]]
    second = convert(masks=masks, inference_logprobs=None).samples[1]
    assert (second.completion_ids, second.reward) == ((), 0.0)
