"""Two passes of one model are the same: in training and evaluation, and whatever is beside a sequence."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from lachesis.common.errors import ConfigError
from lachesis.train.model.repeatable import make_repeatable, require_long_factors
from tests.tiny import tiny_model
from tests.unit.train.model.test_forward import check_against_plain, random_groups


@torch.no_grad()
@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("phimoe", {}),
        ("phimoe", {"input_jitter_noise": 0.1}),
        ("mixtral", {"router_jitter_noise": 0.3}),
        ("gpt2", {"resid_pdrop": 0.5, "attn_pdrop": 0.5}),
    ],
)
def test_training_mode_computes_what_evaluation_does(architecture: str, options: dict[str, float]):
    model, ids = tiny_model(architecture, **options), torch.arange(5, 30)[None]
    make_repeatable(model)
    expected = model.eval()(input_ids=ids).logits
    torch.testing.assert_close(model.train()(input_ids=ids).logits, expected)


@torch.no_grad()
def test_without_it_a_router_draws_experts_while_it_is_trained():
    torch.manual_seed(0)
    model, ids = tiny_model("phimoe"), torch.arange(5, 30)[None]
    expected = model(input_ids=ids).logits
    assert (model.train()(input_ids=ids).logits - expected).abs().max() > 0.1


LONGROPE = {"rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


@torch.no_grad()
@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("phi3", {}),
        (
            "phimoe",
            {
                "rope_parameters": LONGROPE
                | {"rope_type": "longrope", "original_max_position_embeddings": 8}
                | {"short_mscale": 1.0, "long_mscale": 1.2}
            },
        ),
        ("llama", {"max_position_embeddings": 8, "rope_parameters": DYNAMIC}),
        ("hunyuan_v1_dense", {"max_position_embeddings": 8, "rope_parameters": DYNAMIC | {"alpha": 1000.0}}),
    ],
)
def test_rotary_factors_do_not_depend_on_the_longest_sequence_of_a_pass(architecture: str, options: dict[str, Any]):
    """Sequences below and above the original context of 8 tokens, alone and in one pack."""
    model = tiny_model(architecture, **options)
    make_repeatable(model)
    short, long = torch.arange(5, 10)[None], torch.arange(5, 25)[None]
    alone = model(input_ids=short).logits
    model(input_ids=long)
    torch.testing.assert_close(model(input_ids=long).logits[:, :5], alone, atol=1e-4, rtol=1e-4)
    check_against_plain(model, random_groups(groups=4, samples=3, longest=9), max_tokens=1 << 20)


@pytest.mark.parametrize(("max_model_len", "refused"), [(8, True), (9, False), (None, False)])
def test_an_engine_that_takes_the_short_factors_is_refused(max_model_len: int | None, refused: bool):
    with pytest.raises(ConfigError, match=r"engine\.max_model_len above 8") if refused else nullcontext():
        require_long_factors(tiny_model("phi3"), max_model_len)
