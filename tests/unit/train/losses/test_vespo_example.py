"""The example of a loss of one's own: TRL's own values, whatever the micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lachesis.train.losses.custom import load_custom_loss
from tests.losses import loss_options
from tests.paths import ROOT
from tests.unit.train.losses.test_loss import RECORDED, _assert_agrees, _loss, _options, _packed, _select

FILE = f"{ROOT}/examples/losses/vespo.py:vespo"
# Those without a correction of TRL's beside it, and with tokens as they are in the file.
NAMES = ("core", "old_none", "tool_mask", "mask_truncated", "opsm", "entropy_quantile", "entropy_coef", "vespo_params")
CASES = [case for case in RECORDED["cases"] if case["config"]["loss_type"] == "vespo"]


def _loaded(case: dict[str, Any]) -> dict[str, Any]:
    own = {name.removeprefix("vespo_"): value for name, value in case["config"].items() if name.startswith("vespo_")}
    plain = case | {
        "config": {name: value for name, value in case["config"].items() if name.removeprefix("vespo_") not in own}
    }
    loss = load_custom_loss({"function": FILE, "kwargs": own})
    return {"token_loss": loss, "options": _options(plain | {"config": plain["config"] | {"loss_type": "dapo"}})}


@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_trl(name: str):
    cases = [case for case in CASES if case["name"] == name]
    assert cases
    for case in cases:
        inputs, _ = packed = _packed(case, torch.float64)
        counts = {"num_sequences": case["n_rows"], "num_tokens": case["num_items_in_batch"]}
        out = _loss(inputs, **counts, **_loaded(case))
        out.loss.backward()
        _assert_agrees(case, out, packed.padded(inputs["logprobs"].grad), torch.float64)


def test_micro_batches_add_up():
    case = next(case for case in CASES if case["name"] == "accum")
    inputs, _ = _packed(case, torch.float64)
    counts = {"num_sequences": 16, "num_tokens": case["num_items_in_batch"], **_loaded(case)}
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    losses = [_loss(_select(inputs, rows), **counts).loss for rows in order.split([3, 1, 7, 5])]
    assert torch.stack(losses).sum().item() == pytest.approx(case["loss"], rel=1e-6)


def test_it_weighs_by_the_sign_of_the_advantage():
    options = {"options": loss_options(loss_type="dapo"), "token_loss": load_custom_loss(FILE)}
    inputs = _packed(next(case for case in CASES if case["name"] == "core"), torch.float64).inputs
    plain, swapped = (
        _loss(inputs, num_sequences=16, num_tokens=1, **(options | {"token_loss": load_custom_loss(given)})).loss
        for given in (
            FILE,
            {"function": FILE, "kwargs": {"k_pos": 3.0, "lambda_pos": 2.0, "k_neg": 2.0, "lambda_neg": 3.0}},
        )
    )
    assert plain.item() != pytest.approx(swapped.item(), rel=1e-2)
