"""What a server knows of a prompt before its engine does."""

from __future__ import annotations

import pytest

from lachesis.engines.serving.bodies import Refused
from lachesis.engines.serving.served import AdapterStatus
from lachesis.engines.serving.server import check_model, check_prompt
from tests.unit.engines.serving.fakes import INFO
from tests.unit.engines.serving.test_generation import generate


@pytest.mark.parametrize("name", [None, "tiny", "/models/tiny", "policy", "mine"])
def test_all_names_mean_the_weights_in_force(name):
    check_model(name, info=INFO, adapter=AdapterStatus("mine", 2, 4.0))
    with pytest.raises(Refused, match="no model 'other'") as caught:
        check_model("other", info=INFO, adapter=None)
    assert caught.value.status == 404 and "policy" in caught.value.remedy
    with pytest.raises(Refused):
        check_model("mine", info=INFO, adapter=None)


def test_prompts_have_tokens_that_the_model_knows_and_room_for_the_completion():
    fits = generate(prompt=None, prompt_token_ids=[5] * 30, max_tokens=2)
    check_prompt(fits, info=INFO)
    check_prompt(generate(prompt=None, prompt_token_ids=[99] * 31), info=INFO)
    check_prompt(generate(prompt="text" * 100), info=INFO)
    for wrong in (
        {"prompt_token_ids": [100]},
        {"prompt_token_ids": [5] * 32},
        {"prompt_token_ids": [5], "max_tokens": 32},
    ):
        with pytest.raises(Refused) as caught:
            check_prompt(generate(prompt=None, **wrong), info=INFO)
        assert caught.value.status == 400 and caught.value.remedy
