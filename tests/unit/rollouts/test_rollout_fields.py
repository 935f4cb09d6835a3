from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from lachesis.common.errors import EngineError
from lachesis.rollouts.rollout_fields import Fields, read_fields

GOOD: dict[str, Any] = {
    "prompt_ids": [[1, 2], [1, 2], [3], [3]],
    "completion_ids": [[5], [6, 7], [8, 9, 9], [4]],
    "logprobs": [[-0.5], [-0.1, -0.2], [0.0, -1.0, -2.0], [-3]],
}


def read(**changes: Any) -> Fields:
    output = {name: value for name, value in (GOOD | changes).items() if value != "absent"}
    return read_fields(output, name="mine.rollout", prompts=2, num_generations=2, vocab_size=10)


def test_good_fields():
    fields = read()
    assert fields.completion_ids == GOOD["completion_ids"]
    assert fields.logprobs[3] == [-3.0]
    assert (fields.env_mask, fields.extras) == (None, {})


def test_tensors_arrays_and_nested_logprobs():
    fields = read(
        completion_ids=torch.tensor([[5, 6]] * 4),
        logprobs=[np.array([-1.0, -0.5]), [[-1.0], [-0.5]], torch.tensor([[-1.0], [-0.5]]), (-1, -0.5)],
        env_mask=torch.tensor([[1, 0]] * 4),
    )
    assert fields.completion_ids == [[5, 6]] * 4
    assert fields.logprobs == [[-1.0, -0.5]] * 4
    assert fields.env_mask == [[1, 0]] * 4


def test_unknown_logprobs_are_nan():
    assert all(math.isnan(value) for row in read(logprobs=None).logprobs for value in row)
    assert math.isnan(read(logprobs=[[math.nan], *GOOD["logprobs"][1:]]).logprobs[0][0])


def test_further_fields_have_a_value_per_completion_or_one_for_all():
    fields = read(env_reward=[1, 2, 3, 4], won=torch.tensor([1, 0, 0, 1]), level="hard", logprob_token_ids=[[1]])
    assert fields.extras == {"env_reward": [1, 2, 3, 4], "won": [1, 0, 0, 1], "level": ["hard"] * 4}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": "absent"}, "returned no 'prompt_ids'; it returned completion_ids, logprobs"),
        ({"logprobs": "absent"}, "returned no 'logprobs'"),
        ({"completion_ids": [[5]] * 2}, "returned 2 completion_ids for 4 prompts; each prompt comes"),
        ({"completion_ids": [[5]] * 8}, "returned 8 completion_ids for 4 prompts; each prompt comes"),
        ({"completion_ids": [[5]] * 3}, "returned 3 completion_ids for 4 prompts ->"),
        ({"prompt_ids": [[1], [1], [], [1]]}, r"prompt_ids\[2\] is \[\]"),
        ({"completion_ids": [[5], [6, -7], [8, 9, 9], [4]]}, r"completion_ids\[1\] is \[6, -7\]"),
        ({"completion_ids": [[5], [6, 0.5], [8, 9, 9], [4]]}, r"completion_ids\[1\]"),
        ({"completion_ids": [[5], [6, True], [8, 9, 9], [4]]}, r"completion_ids\[1\]"),
        (
            {"completion_ids": [[5], [6, 10], [8, 9, 9], [4]]},
            r"completion_ids\[1\] has the token 10, and the model's vocab",
        ),
        ({"prompt_ids": [[1], [1], [1], [77]]}, r"prompt_ids\[3\] has the token 77, and the model's vocabulary 10"),
        ({"completion_ids": "text"}, "completion_ids is 'text', not a list"),
        ({"completion_ids": [5, 6, 7, 8]}, "not a list with a list per completion"),
        ({"logprobs": [[-0.5]] * 4}, r"logprobs\[1\] has 1 values for 2 tokens"),
        ({"logprobs": [[-0.5]] * 3}, "returned 3 logprobs for 4 completions"),
        ({"logprobs": [[0.7], *GOOD["logprobs"][1:]]}, r"logprobs\[0\] has 0\.7, no logprob"),
        ({"logprobs": [[-math.inf], *GOOD["logprobs"][1:]]}, r"logprobs\[0\] has -inf"),
        ({"logprobs": [["x"], *GOOD["logprobs"][1:]]}, r"logprobs\[0\] has 'x'"),
        ({"logprobs": [[[-1.0, -2.0]], *GOOD["logprobs"][1:]]}, r"logprobs\[0\] has \[-1\.0, -2\.0\]"),
        ({"env_mask": [[1], [1, 2], [1, 1, 1], [1]]}, r"env_mask\[1\] is \[1, 2\]"),
        ({"env_mask": [[1], [1], [1, 1, 1], [1]]}, r"env_mask\[1\] has 1 values for 2 tokens"),
        ({"env_reward": [1.0] * 3}, "returned 3 values in 'env_reward' for 4 completions"),
    ],
)
def test_each_fault_is_named_with_its_place(changes, message):
    with pytest.raises(EngineError, match=message) as caught:
        read(**changes)
    assert "'mine.rollout'" in caught.value.message
    assert caught.value.remedy


@pytest.mark.parametrize("output", [None, [{}], "x"])
def test_what_is_no_dictionary(output):
    with pytest.raises(EngineError, match="no dictionary"):
        read_fields(output, name="f", prompts=1, num_generations=1, vocab_size=10)
