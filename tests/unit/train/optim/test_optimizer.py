from __future__ import annotations

import importlib.util
import io
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from lachesis.common.errors import CheckpointError, ConfigError, DependencyError, ModelError, TrainingError
from lachesis.config.schema import OptimizerConfig
from lachesis.train.optim import weight_update
from lachesis.train.optim.optimizer import (
    Phases,
    PolicyOptimizer,
    Schedule,
    build_optimizer,
    schedule_factor,
    warmup_length,
)

EIGHT_BIT = [name for name in ("bitsandbytes", "torchao") if importlib.util.find_spec(name)]


def optimizer_over(
    *parameters: Parameter, learning_rate: float = 1e-2, total_steps: int = 100, **settings: Any
) -> PolicyOptimizer:
    return build_optimizer(
        [(f"p{i}", p) for i, p in enumerate(parameters)],
        OptimizerConfig(**settings),
        learning_rate=learning_rate,
        total_steps=total_steps,
    )


def make_parameters(*dtypes: torch.dtype, seed: int = 0) -> list[Parameter]:
    """A matrix large enough for quantized states and a vector, for each dtype."""
    source = torch.Generator().manual_seed(seed)
    shapes = [shape for _ in dtypes for shape in ((64, 128), (32,))]
    kinds = [dtype for dtype in dtypes for _ in range(2)]
    return [
        Parameter((0.1 * torch.randn(shape, generator=source)).to(dtype))
        for shape, dtype in zip(shapes, kinds, strict=True)
    ]


def set_gradients(parameters: list[Parameter], *, seed: int, scale: float = 1.0) -> None:
    source = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = (scale * torch.randn(p.shape, generator=source)).to(p.dtype)


def run(optimizer: PolicyOptimizer, parameters: list[Parameter], steps: range) -> None:
    for step in steps:
        set_gradients(parameters, seed=step)
        optimizer.step()
        optimizer.zero_grad()


def values(parameters: list[Parameter]) -> list[Tensor]:
    return [p.detach().clone() for p in parameters]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_adamw_with_clipping_is_torchs() -> None:
    ours, theirs = make_parameters(torch.float32), make_parameters(torch.float32)
    optimizer = optimizer_over(*ours, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6, max_grad_norm=2.0)
    reference = torch.optim.AdamW(
        [{"params": theirs[:1], "weight_decay": 0.1}, {"params": theirs[1:], "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.8, 0.95),
        eps=1e-6,
    )
    for step in range(5):
        set_gradients(ours, seed=step)
        set_gradients(theirs, seed=step)
        expected = torch.nn.utils.clip_grad_norm_(theirs, 2.0)
        reference.step()
        assert optimizer.step() == pytest.approx(expected.item(), rel=1e-6)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def test_norm_is_that_before_clipping() -> None:
    p, q = Parameter(torch.zeros(2, 1)), Parameter(torch.zeros(1, dtype=torch.bfloat16))
    optimizer = optimizer_over(p, q, max_grad_norm=0.1)
    p.grad, q.grad = torch.tensor([[3.0], [4.0]]), torch.tensor([12.0], dtype=torch.bfloat16)
    assert optimizer.step() == pytest.approx(13.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clipped_gradients_reach_adams_moments(dtype: torch.dtype) -> None:
    p = Parameter(torch.zeros(1, 1, dtype=dtype))
    optimizer = optimizer_over(p, max_grad_norm=0.5)
    p.grad = torch.full_like(p, 8.0)
    optimizer.step()
    moment = optimizer.state_dict()["parts"][0]["optimizer"]["state"][0]["exp_avg"]
    assert moment.item() == pytest.approx(0.5 * (1 - 0.9), rel=1e-5)


def test_norm_of_bfloat16_gradients_is_not_rounded_to_bfloat16() -> None:
    p = Parameter(torch.zeros(1001, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    assert optimizer_over(p).step() == pytest.approx(1001**0.5, rel=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_non_finite_gradient_changes_nothing(bad: float, dtype: torch.dtype) -> None:
    parameters = make_parameters(dtype)
    optimizer = optimizer_over(*parameters, schedule="linear", max_skipped_steps=0)
    run(optimizer, parameters, range(1))
    before, rate = values(parameters), optimizer.learning_rate
    state = through_a_file(optimizer.state_dict())["parts"]
    set_gradients(parameters, seed=1)
    assert parameters[1].grad is not None
    parameters[1].grad[3] = bad
    with pytest.raises(TrainingError, match=r"at optimizer step 2, from p1;.*learning_rate"):
        optimizer.step()
    assert equal(values(parameters), before)
    assert optimizer.learning_rate == rate
    leaves = zip(tree_leaves(optimizer.state_dict()["parts"]), tree_leaves(state), strict=True)
    assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in leaves)


def test_a_step_that_is_not_finite_is_skipped_and_ends_the_run_only_when_it_repeats(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parameters = make_parameters(torch.float32)
    optimizer = optimizer_over(*parameters, schedule="linear", max_skipped_steps=2)

    def step(*, bad: bool) -> tuple[bool, bool]:
        before = values(parameters)
        set_gradients(parameters, seed=1)
        assert parameters[1].grad is not None
        parameters[1].grad[3] = float("inf") if bad else 0.0
        optimizer.step()
        return equal(values(parameters), before), optimizer.skipped

    assert [step(bad=bad) for bad in (True, True, False, True)] == [(True, True)] * 2 + [(False, False), (True, True)]
    assert optimizer.steps_taken == 4
    assert (
        "the gradient norm is inf at optimizer step 2, from p1" in caplog.text and "(2 skipped in a row)" in caplog.text
    )
    resumed = optimizer_over(*parameters, schedule="linear", max_skipped_steps=2)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    optimizer = resumed
    step(bad=True)
    with pytest.raises(TrainingError, match="at optimizer step 6"):
        step(bad=True)


@pytest.mark.parametrize("warmup", [{"warmup_steps": 2}, {"warmup_ratio": 0.4}])
def test_rate_follows_the_schedule(warmup: dict[str, float]) -> None:
    p = Parameter(torch.zeros(1, 1))
    optimizer = optimizer_over(p, learning_rate=1.0, total_steps=4, schedule="linear", **warmup)
    moved = []
    for _ in range(4):
        before = p.item()
        rate = optimizer.learning_rate
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert before - p.item() == pytest.approx(rate, rel=1e-4)  # AdamW moves by the rate
        moved.append(rate)
    assert moved == pytest.approx([0.5, 1.0, 1.0, 0.5])
    assert optimizer.steps_taken == 4


def test_vectors_do_not_decay() -> None:
    matrix, vector = Parameter(torch.ones(2, 2)), Parameter(torch.ones(2))
    optimizer = optimizer_over(matrix, vector, weight_decay=0.5, learning_rate=0.1)
    matrix.grad, vector.grad = torch.zeros_like(matrix), torch.zeros_like(vector)
    optimizer.step()
    assert (vector == 1).all()
    torch.testing.assert_close(matrix.detach(), torch.full((2, 2), 0.95))


def test_frozen_and_unused_parameters_stay() -> None:
    frozen = Parameter(torch.ones(2, 2), requires_grad=False)
    used, unused = Parameter(torch.ones(2, 2)), Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    optimizer = optimizer_over(frozen, used, unused)
    used.grad = torch.ones_like(used)
    optimizer.step()
    assert (frozen == 1).all() and (unused == 1).all() and (used < 1).all()


def test_without_any_gradient_only_the_schedule_advances() -> None:
    p = Parameter(torch.ones(2, 2))
    optimizer = optimizer_over(p, weight_decay=0.5)
    assert optimizer.step() == 0.0
    assert (p == 1).all() and optimizer.steps_taken == 1


def test_nothing_to_train_is_an_error() -> None:
    with pytest.raises(ModelError, match="requires a gradient"):
        optimizer_over(Parameter(torch.ones(1), requires_grad=False))


# 200 steps of 1e-6. From 2**-11 to 2**-10, bfloat16 has a value every 3.8e-6: a step is a quarter of that.


def walk(initial: Tensor, dtype: torch.dtype, weight_update: str) -> Tensor:
    """How far AdamW moves weights in 200 steps of 1e-6 under a constant gradient."""
    p = Parameter(initial.to(dtype, copy=True))
    optimizer = optimizer_over(p, learning_rate=1e-6, total_steps=200, weight_update=weight_update)
    gradient = torch.where(torch.arange(initial.numel()).view_as(initial) % 2 == 0, 1.0, -1.0).to(dtype)
    for _ in range(200):
        p.grad = gradient.clone()
        optimizer.step()
    return (p.detach().float() - initial) * -gradient.float()


@pytest.fixture(scope="module")
def weights() -> Tensor:
    """Values of bfloat16 whose walk stays between 2**-11 and 2**-10, either way."""
    uniform = torch.rand(100, 300, generator=torch.Generator().manual_seed(0))
    return (0.00070 + 0.00006 * uniform).bfloat16().float()


@pytest.fixture(scope="module")
def movement(weights: Tensor) -> Tensor:
    found = walk(weights, torch.float32, "auto")
    assert found.mean().item() == pytest.approx(2e-4, rel=1e-3)
    return found


def test_plain_bfloat16_does_not_move(weights: Tensor) -> None:
    assert (walk(weights, torch.bfloat16, "plain") == 0).all()


@pytest.mark.parametrize("update", ["auto", "fp32_master"])
def test_every_bfloat16_weight_with_a_master_moves_as_in_float32(
    weights: Tensor, movement: Tensor, update: str
) -> None:
    moved = walk(weights, torch.bfloat16, update)
    assert ((moved - movement).abs() <= 0.01 * movement).all()


def test_stochastically_rounded_bfloat16_moves_as_in_float32_on_average(weights: Tensor, movement: Tensor) -> None:
    moved = walk(weights, torch.bfloat16, "stochastic_rounding")
    assert moved.mean().item() == pytest.approx(movement.mean().item(), rel=0.01)


def test_rounding_works_for_weights_of_usual_size() -> None:
    initial = (0.02 * torch.randn(300, 500, generator=torch.Generator().manual_seed(0))).bfloat16().float()
    moved = walk(initial, torch.bfloat16, "stochastic_rounding")
    assert moved.mean().item() == pytest.approx(2e-4, rel=0.01)


@pytest.mark.parametrize("update", ["fp32_master", "stochastic_rounding", "plain"])
def test_weights_keep_their_storage(update: str) -> None:
    storage = torch.ones(8, 64, dtype=torch.bfloat16)
    upper, lower = Parameter(storage[:4]), Parameter(storage[4:])  # as q and k in an engine's fused tensor
    optimizer = optimizer_over(upper, lower, weight_update=update, learning_rate=0.1)
    upper.grad, lower.grad = torch.ones_like(upper), -torch.ones_like(lower)
    optimizer.step()
    assert (storage[:4] < 1).all() and (storage[4:] > 1).all()


def test_float32_adapter_on_a_bfloat16_base() -> None:
    base, adapter = make_parameters(torch.bfloat16)[0], make_parameters(torch.float32)[0]
    alone = Parameter(adapter.detach().clone())
    together, only = optimizer_over(base, adapter), optimizer_over(alone)
    set_gradients([adapter], seed=0, scale=1e-3)
    set_gradients([alone], seed=0, scale=1e-3)
    base.grad = torch.full_like(base, 1e-3)
    before = values([base])[0]
    together.step()
    only.step()
    torch.testing.assert_close(adapter, alone)
    assert not torch.equal(base, before)


@pytest.mark.parametrize("update", ["fp32_master", "stochastic_rounding"])
def test_buckets_change_nothing(update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for size in (2**26, 1000):
        monkeypatch.setattr(weight_update, "BUCKET_ELEMENTS", size)
        parameters = make_parameters(torch.bfloat16, torch.bfloat16)
        run(optimizer_over(*parameters, weight_update=update, weight_decay=0.1), parameters, range(3))
        results.append(values(parameters))
    assert equal(*results)


@pytest.mark.parametrize("update", ["fp32_master", "stochastic_rounding", "plain"])
@pytest.mark.parametrize("kind", ["adamw", "adamw_cpu", "adafactor", "adamw_8bit", "muon"])
def test_resuming_is_exact(kind: str, update: str) -> None:
    if kind == "adamw_8bit" and not EIGHT_BIT:
        pytest.skip("no library with 8-bit states")
    settings = {"kind": kind, "weight_update": update, "schedule": "cosine", "warmup_steps": 2}
    dtypes = (torch.bfloat16, torch.float32)
    straight = make_parameters(*dtypes)
    optimizer = optimizer_over(*straight, **settings)
    run(optimizer, straight, range(3))
    state, weights = through_a_file(optimizer.state_dict()), values(straight)
    run(optimizer, straight, range(3, 6))

    resumed = make_parameters(*dtypes)
    with torch.no_grad():
        for p, saved in zip(resumed, weights, strict=True):
            p.copy_(saved)
    again = optimizer_over(*resumed, **settings)
    again.load_state_dict(state)
    run(again, resumed, range(3, 6))
    assert equal(values(straight), values(resumed))
    assert again.learning_rate == optimizer.learning_rate


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kind": "adafactor"}, "kind"),
        ({"weight_update": "plain"}, "weight_update"),
        ({"weight_update": "stochastic_rounding"}, "noise_device"),
    ],
)
def test_state_of_another_optimizer_is_refused(change: dict[str, Any], named: str) -> None:
    state = optimizer_over(*make_parameters(torch.bfloat16)).state_dict()
    other = optimizer_over(*make_parameters(torch.bfloat16), **change)
    with pytest.raises(CheckpointError, match=f"its {named} is"):
        other.load_state_dict(state)


def test_state_of_other_parameters_is_refused() -> None:
    state = optimizer_over(*make_parameters(torch.float32)).state_dict()
    with pytest.raises(CheckpointError, match="its parameters is"):
        optimizer_over(*make_parameters(torch.float32)[:1]).load_state_dict(state)


def only(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {"bitsandbytes", "torchao"} - {library}:
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setitem(sys.modules, f"{name}.optim", None)


@pytest.mark.parametrize("library", EIGHT_BIT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_bit_states_follow_adamw(library: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    only(library, monkeypatch)
    start = values(make_parameters(dtype))
    exact, small = make_parameters(dtype), make_parameters(dtype)
    run(optimizer_over(*exact), exact, range(8))
    optimizer = optimizer_over(*small, kind="adamw_8bit")
    run(optimizer, small, range(8))
    used = {"bitsandbytes": "bitsandbytes.AdamW8bit", "torchao": "lachesis.EagerAdamW8bit"}
    assert optimizer.state_dict()["implementation"] == used[library]
    for p, q, origin in zip(small, exact, start, strict=True):
        error = (p.detach().float() - q.detach().float()).norm() / (q.detach().float() - origin.float()).norm()
        assert error < 0.1


@pytest.mark.parametrize("library", EIGHT_BIT)
def test_eight_bit_states_take_two_bytes_a_parameter(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only(library, monkeypatch)
    p = Parameter(torch.zeros(512, 512))
    optimizer = optimizer_over(p, kind="adamw_8bit")
    run(optimizer, [p], range(1))
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    assert 2.0 < buffer.tell() / p.numel() < 2.2


def test_missing_library_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    only("none", monkeypatch)
    with pytest.raises(DependencyError, match="pip install bitsandbytes"):
        optimizer_over(*make_parameters(torch.float32), kind="adamw_8bit")


@pytest.mark.parametrize("scale", [False, True])
def test_adafactor_is_transformers(scale: bool) -> None:
    from transformers.optimization import Adafactor

    ours, theirs = make_parameters(torch.float32), make_parameters(torch.float32)
    reference = Adafactor(theirs, lr=1e-2, scale_parameter=scale, relative_step=False)
    optimizer = optimizer_over(*ours, kind="adafactor", scale_parameter=scale, max_grad_norm=None)
    for step in range(3):
        set_gradients(ours, seed=step)
        set_gradients(theirs, seed=step)
        optimizer.step()
        reference.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q)


def test_muon_turns_matrices_and_adamw_the_rest() -> None:
    """As torch has both; a step of a matrix has singular values near 0.2·√max(rows, columns) of the rate."""
    named = ["layers.0.q_proj.weight", "norm.weight", "model.embed_tokens.weight"]
    ours = [*make_parameters(torch.float32), Parameter(torch.ones(10, 8))]
    theirs = [*make_parameters(torch.float32), Parameter(torch.ones(10, 8))]
    config = OptimizerConfig(kind="muon", weight_decay=0.1, max_grad_norm=None)
    optimizer = build_optimizer(zip(named, ours, strict=True), config, learning_rate=1e-2, total_steps=10)
    muon = torch.optim.Muon(theirs[:1], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": theirs[1:2], "weight_decay": 0.0}, {"params": theirs[2:], "weight_decay": 0.1}]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=config.betas)
    for step in range(3):
        before = ours[0].detach().clone()
        set_gradients(ours, seed=step)
        set_gradients(theirs, seed=step)
        optimizer.step()
        muon.step()
        adamw.step()
        turned = torch.linalg.svdvals((ours[0].detach() - (1 - 1e-3) * before) / (1e-2 * 0.2 * 128**0.5))
        assert float(turned.min()) > 0.6 and float(turned.max()) < 1.3
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q)


def test_on_a_cpu_states_are_on_the_cpu_anyway() -> None:
    ours, theirs = make_parameters(torch.bfloat16), make_parameters(torch.bfloat16)
    run(optimizer_over(*ours, kind="adamw_cpu"), ours, range(3))
    run(optimizer_over(*theirs, kind="adamw"), theirs, range(3))
    assert equal(values(ours), values(theirs))


def test_float16_has_masters_but_no_stochastic_rounding() -> None:
    parameters = make_parameters(torch.float16)
    before = values(parameters)
    run(optimizer_over(*parameters), parameters, range(1))
    assert not equal(values(parameters), before)
    with pytest.raises(ConfigError, match="p0 is float16"):
        optimizer_over(*parameters, weight_update="stochastic_rounding")


def course(schedule: Schedule, *, warmup_steps: int = 0, min_lr_ratio: float = 0.0) -> list[float]:
    return [
        schedule_factor(step, schedule=schedule, total_steps=8, warmup_steps=warmup_steps, min_lr_ratio=min_lr_ratio)
        for step in range(9)
    ]


@pytest.mark.parametrize(
    ("steps", "ratio", "length"), [(0, 0.0, 0), (5, 0.0, 5), (0, 0.1, 3), (0, 0.11, 4), (0, 0.001, 1), (0, 1.0, 30)]
)
def test_warm_up_is_given_in_steps_or_as_a_share_rounded_up(steps: int, ratio: float, length: int) -> None:
    assert warmup_length(steps=steps, ratio=ratio, total_steps=30) == length


def test_constant() -> None:
    assert course("constant") == [1.0] * 9


def test_first_step_of_warm_up_already_learns() -> None:
    assert course("constant", warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1])


def test_linear_reaches_its_end_after_the_last_step() -> None:
    assert course("linear") == pytest.approx([1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0])


def test_linear_after_warm_up_ends_at_its_share_of_the_peak() -> None:
    expected = [0.25, 0.5, 0.75, 1, 1, 0.775, 0.55, 0.325, 0.1]
    assert course("linear", warmup_steps=4, min_lr_ratio=0.1) == pytest.approx(expected)


def test_cosine_is_half_a_period() -> None:
    factors = course("cosine", min_lr_ratio=0.2)
    assert factors[0] == pytest.approx(1.0)
    assert factors[2] == pytest.approx(0.2 + 0.8 * (1 + 2**-0.5) / 2)
    assert factors[4] == pytest.approx(0.6)
    assert factors[8] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        (Phases(decay=2, shape="linear"), [0.5, 1, 1, 1, 1, 1, 1, 0.55, 0.1]),
        (Phases(stable=2, decay=4), [0.5, 1, 1, 1, 1, 0.868198, 0.55, 0.231802, 0.1]),
        (Phases(decay=4, shape="1-sqrt"), [0.5, 1, 1, 1, 1, 0.55, 0.363604, 0.220577, 0.1]),
        (Phases(), [0.5, 1, 1, 1, 1, 1, 1, 1, 0.1]),
    ],
)
def test_warmup_stable_decay(phases: Phases, expected: list[float]) -> None:
    common = {"total_steps": 8, "warmup_steps": 2, "min_lr_ratio": 0.1}
    factors = [schedule_factor(n, schedule="warmup_stable_decay", phases=phases, **common) for n in range(9)]  # type: ignore[arg-type]
    assert factors == pytest.approx(expected, abs=1e-6)


def test_warm_up_is_cut_to_the_run() -> None:
    assert warmup_length(steps=500, ratio=0.0, total_steps=2) == 2


def test_steps_beyond_the_end_stay_at_the_minimum() -> None:
    for schedule in ("linear", "cosine"):
        assert schedule_factor(99, schedule=schedule, total_steps=8, min_lr_ratio=0.3) == pytest.approx(0.3)


def test_warm_up_longer_than_the_run() -> None:
    assert schedule_factor(8, schedule="linear", total_steps=4, warmup_steps=10) == pytest.approx(0.9)
