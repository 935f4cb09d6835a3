from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from lachesis.train.optim import weight_update
from lachesis.train.optim.weight_update import MasterCopies, StochasticRounding, buckets, stochastic_round_


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("value", [0.3, -0.3, 1e-6, 3.0, -1.0039, 2.0**-130])
def test_stochastic_rounding_is_unbiased_and_hits_only_the_neighbours(value: float) -> None:
    count = 200_000
    values = torch.full((count,), value)
    rounded = stochastic_round_(torch.empty(count, dtype=torch.bfloat16), values, generator=generator())
    nearest = values[:1].bfloat16()
    toward = torch.tensor([float("inf")], dtype=torch.bfloat16) * (1 if nearest.float() < values[0] else -1)
    neighbours = {nearest.item(), torch.nextafter(nearest, toward).item()}
    assert set(rounded.unique().tolist()) <= neighbours
    spacing = max(neighbours) - min(neighbours)
    # Five standard errors of a coin that has at most variance 1/4.
    assert rounded.double().mean().item() == pytest.approx(values[0].item(), abs=5 * 0.5 * spacing / count**0.5)


def test_representable_values_stay() -> None:
    values = torch.cat([torch.randn(1000, generator=generator()), torch.tensor([0.0, torch.inf, -torch.inf])])
    exact = values.bfloat16()
    assert torch.equal(stochastic_round_(torch.empty_like(exact), exact.float()), exact)


def test_nan_stays_nan() -> None:
    target = torch.zeros(100, dtype=torch.bfloat16)
    assert stochastic_round_(target, torch.full((100,), torch.nan)).isnan().all()


def test_equal_seeds_round_equally() -> None:
    values = torch.randn(1000, generator=generator())
    first, second, third = (
        stochastic_round_(torch.empty(1000, dtype=torch.bfloat16), values, generator=generator(seed))
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


def test_rounding_keeps_the_storage_even_of_a_view() -> None:
    storage = torch.zeros(4, 6, dtype=torch.bfloat16)
    view = storage[:, 2:4]
    stochastic_round_(view, torch.ones(4, 2))
    assert storage.sum() == 8
    assert torch.equal(view, torch.ones(4, 2, dtype=torch.bfloat16))


def test_masters_collect_what_the_weights_cannot_hold() -> None:
    parameter = Parameter(torch.ones(3, dtype=torch.bfloat16))
    update = MasterCopies([parameter], dtype=torch.float32)
    with torch.no_grad():
        update.slots[0].add_(1e-3)
        update.commit()
        assert (parameter == 1).all()
        for _ in range(7):
            update.slots[0].add_(1e-3)
            update.commit()
    assert (parameter == 1.0078125).all()


def test_staged_gradients_are_scaled_float32_and_leave_the_originals() -> None:
    parameter = Parameter(torch.ones(2, dtype=torch.bfloat16))
    parameter.grad = torch.tensor([1.0, 3.0], dtype=torch.bfloat16)
    for update in (
        MasterCopies([parameter], dtype=torch.float32),
        StochasticRounding([parameter], generator=generator()),
    ):
        update.stage(1 / 3)
        assert update.slots[0].grad is not None
        assert torch.equal(update.slots[0].grad, torch.tensor([1.0, 3.0]) * (1 / 3))
        assert torch.equal(parameter.grad, torch.tensor([1.0, 3.0], dtype=torch.bfloat16))


def test_stochastic_slots_hold_nothing_between_steps() -> None:
    parameter = Parameter(torch.ones(1000, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    update = StochasticRounding([parameter], generator=generator())
    update.stage(1.0)
    assert update.slots[0].numel() == 1000
    update.commit()
    assert update.slots[0].numel() == 0
    assert update.slots[0].grad is None


def test_buckets_keep_the_order_and_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_update, "BUCKET_ELEMENTS", 10)
    named = [(str(n), Parameter(torch.zeros(n))) for n in (4, 5, 2, 30, 1, 9, 1)]
    assert [[name for name, _ in run] for run in buckets(named)] == [
        ["4", "5"],
        ["2"],
        ["30"],
        ["1", "9"],
        ["1"],
    ]
