from __future__ import annotations

import json
from typing import Any

import pytest

from lachesis.plugins.atropos.api.wire import parse_group
from tests.unit.plugins.atropos.api.processes import scored


def problem(**fields: Any) -> str:
    return parse_group(json.dumps(scored(2) | fields).encode(), check=True).problem


def test_sound_groups():
    assert problem() == ""
    assert problem(inference_logprobs=None) == ""
    # What the original's environments send for lists that they do not have.
    assert problem(overrides=[], advantages=[], ref_logprobs=[], messages=[], images=[]) == ""
    assert problem(advantages=[[0.0] * 3] * 2, distill_token_ids=[[[1], [2, 3], []]] * 2,
                   distill_logprobs=[[[-1.0], [-2.0, -3.0], []]] * 2) == ""  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tokens": []}, "tokens is empty"),
        ({"tokens": [[1], []]}, "tokens[1] is empty"),
        ({"scores": [1.0]}, "scores has 1 entry, tokens has 2"),
        ({"masks": []}, "masks has 0 entries, tokens has 2"),
        ({"overrides": [{}]}, "overrides has 1 entry, tokens has 2"),
        ({"masks": [[1, 2, 3], [1, 2]]}, "masks[1] has 2 entries, tokens[1] has 3"),
        ({"ref_logprobs": [[0.0] * 3, [0.0] * 4]}, "ref_logprobs[1] has 4 entries, tokens[1] has 3"),
        (
            {"inference_logprobs": [[1.0, -1.0, -1.0], [1.0, 1.0, -1.0]]},
            "inference_logprobs[1][1] is 1.0, which is not a logprob, where the mask trains",
        ),
        ({"scores": [0.0, -1e308]}, "scores[1] is -1e+308, beyond 1e+15"),
        ({"advantages": [[0.0] * 3, [0.0, 1e38, 0.0]]}, "advantages[1][1] is 1e+38, beyond 1e+15"),
        (
            {"inference_logprobs": [[1.0, -1.0, -1.0], [1.0, -1e308, -1.0]]},
            "inference_logprobs[1] has -1e+308, which no sampled token has, where the mask trains",
        ),
        (
            {"distill_token_ids": [[[1]] * 3] * 2, "distill_logprobs": [[[-1.0]] * 3, [[-1.0], [-1e30], [-1.0]]]},
            "distill_logprobs[1] has -1e+30, which is not a logprob",
        ),
        ({"distill_token_ids": [[[1]] * 3] * 2}, "distill_logprobs is missing, but the other is there"),
        (
            {"distill_token_ids": [[[1]] * 3] * 2, "distill_logprobs": [[[-1.0]] * 3, [[-1.0]] * 2]},
            "distill_logprobs[1] has 2 entries, tokens[1] has 3",
        ),
        (
            {"distill_token_ids": [[[1]] * 3] * 2, "distill_logprobs": [[[-1.0]] * 3, [[-1.0], [], [-1.0]]]},
            "distill_logprobs[1][1] has 0 entries, distill_token_ids[1][1] has 1",
        ),
    ],
)
def test_faults_name_field_and_index(fields: dict[str, Any], reason: str):
    assert problem(**fields) == reason


def test_unchecked_groups_have_no_problem():
    assert parse_group(json.dumps(scored(2) | {"scores": []}).encode(), check=False).problem == ""
