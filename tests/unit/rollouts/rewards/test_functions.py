from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lachesis.rollouts.rewards.functions import BadValue, Excluded, read_rewards


class TestValues:
    @pytest.mark.parametrize(
        "result",
        [
            [1, 0.5, True],
            (1.0, 0.5, 1),
            np.array([1, 0.5, 1], dtype=np.float32),
            torch.tensor([1, 0.5, 1], dtype=torch.bfloat16, requires_grad=True),
            [np.float32(1), np.float64(0.5), np.bool_(True)],
            [torch.tensor(1), torch.tensor(0.5), np.array(1)],
        ],
    )
    def test_numbers_of_all_kinds(self, result):
        values = read_rewards(result, 3)
        assert values == [1.0, 0.5, 1.0]
        assert {type(value) for value in values} == {float}

    def test_excluded_completions_have_a_cause_that_can_be_counted(self):
        excluded = Excluded("No reward: reported")
        assert read_rewards([excluded, 1], 2) == [excluded, 1.0]
        assert excluded.counted == "no_reward_reported"
        with pytest.raises(ValueError, match="needs a cause"):
            Excluded(" ")

    def test_abstaining(self):
        assert read_rewards([None, 0.0], 2) == [None, 0.0]

    @pytest.mark.parametrize(
        "bad",
        [math.nan, -math.inf, 1e308, -1e308, 10**300, np.float64(1e16), "1", 1j, [1.0], torch.ones(1), np.nan, 10**400],
    )
    def test_a_bad_value_is_found_in_its_place(self, bad):
        values = read_rewards([0.5, bad, None], 3)
        assert values[0] == 0.5
        assert values[2] is None
        assert isinstance(values[1], BadValue)

    def test_nan_in_arrays(self):
        assert isinstance(read_rewards(np.array([1.0, np.nan]), 2)[1], BadValue)
        assert isinstance(read_rewards(torch.tensor([1.0, torch.inf]), 2)[1], BadValue)

    @pytest.mark.parametrize(
        ("result", "what"),
        [
            (None, "returned None, not a list"),
            (0.5, "returned a float (0.5), not a list"),
            ("0 1", "returned a str ('0 1'), not a list"),
            ({0: 1, 1: 1}, "returned a dict"),
            ((x for x in [1, 2]), "returned a generator"),
            (torch.tensor(1.0), "returned a float"),
            ([1.0], "returned 1 rewards for 2 completions"),
            (np.ones(3), "returned 3 rewards for 2 completions"),
            ([], "returned 0 rewards for 2 completions"),
        ],
    )
    def test_results_that_are_no_list_of_rewards(self, result, what):
        bad = read_rewards(result, 2)
        assert isinstance(bad, BadValue)
        assert bad.what.startswith(what)
