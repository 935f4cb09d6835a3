"""Groups are whole when they are made, or not made at all."""

from __future__ import annotations

import math

import pytest

from lachesis.common.errors import DataError
from lachesis.common.types import Completion, VersionSpan
from lachesis.plugins.atropos.environments.records import Trajectory, UsableGroup, scored_group
from lachesis.plugins.atropos.environments.tokenizer import chat_prompt
from tests.tiny import tiny_tokenizer


def trajectory() -> Trajectory:
    """A prompt, a turn, the output of a tool, and another turn."""
    made = Trajectory()
    made.give([1, 2])
    made.sample(Completion((3, 4), (-0.1, -0.2), "stop", VersionSpan(5, 5)))
    made.give([9])
    made.sample(Completion((6,), (-0.3,), "length", VersionSpan(6, 7)))
    return made


def test_turns_keep_their_tokens():
    made = trajectory()
    assert made.tokens == [1, 2, 3, 4, 9, 6]
    assert made.masks == [-100, -100, 3, 4, -100, 6]
    assert made.logprobs == [1.0, 1.0, -0.1, -0.2, 1.0, -0.3]
    assert made.sampled_length == 3
    assert made.overrides() == {"finish_reason": "length", "weight_version": {"first": 5, "last": 7}}


def test_document_has_every_field_of_the_protocol():
    document = scored_group([trajectory()], [0.5], temperature=0.7).document(env_id=3)
    assert set(document) == {
        "tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params",
        "inference_logprobs", "overrides", "group_overrides", "images", "env_id", "distill_token_ids",
        "distill_logprobs",
    }  # fmt: skip
    assert document["env_id"] == 3 and document["generation_params"] == {"temperature": 0.7}
    assert document["messages"] is None


SOUND = {
    "tokens": [[1, 2], [1, 3]], "masks": [[-100, 2], [-100, 3]], "scores": [0.0, 1.0],
    "inference_logprobs": [[1.0, -0.5], [1.0, 0.0]],
}  # fmt: skip


def test_sound_group():
    group = UsableGroup(**SOUND)
    assert (group.size, group.longest, group.trained) == (2, 2, 2)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"scores": [0.0]}, "scores has 1 entry, tokens has 2"),
        ({"scores": [0.0, math.nan]}, "scores[1] is nan"),
        ({"masks": [[-100, 2], [3]]}, "masks[1] has 1 entry, tokens[1] has 2"),
        ({"masks": [[-100, 2], [-100, 1]]}, "masks[1][1] is 1, neither -100 nor the token 3"),
        ({"masks": [[-100, 2], [-100, -100]]}, "masks[1] trains no token"),
        ({"inference_logprobs": [[1.0, -0.5]]}, "inference_logprobs has 1 entry"),
        ({"inference_logprobs": []}, "inference_logprobs has 0 entries"),
        ({"inference_logprobs": [[1.0, 1.0], [1.0, -1.0]]}, "inference_logprobs[0][1] is 1.0"),
        ({"inference_logprobs": [[1.0, 0.1], [1.0, -1.0]]}, "inference_logprobs[0][1] is 0.1"),
        ({"inference_logprobs": [[1.0, -math.inf], [1.0, -1.0]]}, "inference_logprobs[0] has -inf"),
        ({"inference_logprobs": [[1.0, math.nan], [1.0, -1.0]]}, "is nan"),
        ({"overrides": [{}]}, "overrides has 1 entry"),
        ({"tokens": [], "masks": [], "scores": [], "inference_logprobs": []}, "tokens is empty"),
    ],
)
def test_faults(changes, fault):
    with pytest.raises(DataError) as caught:
        UsableGroup(**SOUND | changes)
    assert fault in caught.value.message


def test_a_conversation_becomes_plain_token_ids():
    """Newer transformers give a mapping of ids and attention mask, whose length is the number of its keys."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    ids = chat_prompt(tokenizer, [{"role": "user", "content": "abc"}, {"role": "user", "content": "de"}], plain="")
    assert ids == tokenizer.encode("abcde")
    assert all(type(token) is int for token in ids)
