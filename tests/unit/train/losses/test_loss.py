"""The losses: TRL's own values, sums over micro-batches, and the traps that others fell into."""

from __future__ import annotations

import gzip
import json
import math
from functools import cache
from typing import Any, NamedTuple, get_args

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lachesis.common.errors import ConfigError, TrainingError
from lachesis.config.document import Document
from lachesis.config.load import validate
from lachesis.config.schema import AlgorithmConfig
from lachesis.train.losses.covariance import covariance_cut
from lachesis.train.losses.loss import LOSS_TYPES, PolicyLoss, high_entropy_threshold, policy_loss
from lachesis.train.losses.ratios import gather_terms
from tests.losses import loss_options
from tests.paths import GOLDEN

RECORDED = json.loads(gzip.decompress((GOLDEN / "trl-1.16-losses.json.gz").read_bytes()))
FIXTURE = RECORDED["fixture"]
# VESPO is an example, with a test beside it.
CASES = [case for case in RECORDED["cases"] if case["config"]["loss_type"] != "vespo"]
TRL_LOSSES = sorted({case["config"]["loss_type"] for case in CASES})
NAMES = sorted({case["name"] for case in CASES} - {"accum", "model"})
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5}
OURS = {
    "vllm_importance_sampling_mode": "sampler_correction",
    "vllm_importance_sampling_clip_min": "sampler_correction_min",
    "vllm_importance_sampling_clip_max": "sampler_correction_max",
}
METRICS = {
    "entropy": "entropy",
    "kl": "kl_reference",
    "clip_ratio/low_mean": "clip_fraction_low",
    "clip_ratio/high_mean": "clip_fraction_high",
    "clip_ratio/region_mean": "clipped_fraction",
    "cispo_clip_ratio": "clip_fraction_high",
}


class Packed(NamedTuple):
    """A case's tokens as policy_loss takes them, and where they were in the padded batch."""

    inputs: dict[str, Any]
    present: Tensor

    def padded(self, values: Tensor) -> Tensor:
        return values.new_zeros(self.present.shape).masked_scatter(self.present, values)


@cache
def _fixture(name: str, dtype: torch.dtype) -> Tensor:
    rows = [[math.nan if value is None else value for value in row] for row in FIXTURE[name]]
    width = max(map(len, rows))
    return torch.tensor([row + [0.0] * (width - len(row)) for row in rows], dtype=dtype)


def _options(case: dict) -> AlgorithmConfig:
    config = dict(case["config"])
    if not config.get("vllm_importance_sampling_correction", True):
        config["vllm_importance_sampling_mode"] = "none"
    config = {OURS.get(name, name): value for name, value in config.items()}
    if config["loss_type"] == "luspo":
        config |= {"loss_type": "grpo", "normalization": "sequence_sum"}
    if config["loss_type"] == "cispo" and config.get("epsilon_high") is None:
        config["epsilon_high"] = config.get("epsilon", 0.2)  # as TRL has it, without a bound that suits cispo
    return loss_options(**{name: value for name, value in config.items() if name in AlgorithmConfig.model_fields})


def _packed(case: dict, dtype: torch.dtype, rows: slice | None = None) -> Packed:
    rows = rows or slice(0, case["n_rows"])
    present = _fixture("completion_mask", dtype)[rows] > 0
    mask = torch.tensor(case.get("completion_mask", FIXTURE["completion_mask"])[rows], dtype=dtype)
    if case["tool_mask"]:
        mask = mask * _fixture("tool_mask_ragged", dtype)[rows]
    sampler = "sampling_logps_nan" if case["nan_sampling"] else "sampling_logps"
    inputs = {
        "logprobs": _fixture("policy_logps", dtype)[rows][present].requires_grad_(),
        "row": torch.arange(len(present)).unsqueeze(1).expand_as(present)[present],
        "mask": mask[present],
        "advantages": torch.tensor(case["advantages"][rows], dtype=dtype),
        "old_logprobs": _fixture("old_logps", dtype)[rows][present] if case["old_given"] else None,
        "sampling_logprobs": _fixture(sampler, dtype)[rows][present] if case["use_vllm"] else None,
        "ref_logprobs": _fixture("ref_logps", dtype)[rows][present],
        "entropies": _fixture("entropies", dtype)[rows][present].requires_grad_(),
    }
    return Packed(inputs, present)


def _loss(inputs: dict[str, Any], **keywords: Any) -> PolicyLoss:
    return policy_loss(**({"max_completion_length": FIXTURE["max_completion_length"]} | inputs | keywords))


def _mean(pair: Tensor) -> float:
    return (pair[0] / pair[1]).item()


def _metrics_as_trl(case: dict, out: PolicyLoss, num_rows: int) -> dict[str, float]:
    """Our metrics under TRL's names. Its means over sequences count those without a token: left out here."""
    values = {}
    for name, ours in METRICS.items():
        if name not in case["metrics"]:
            continue
        weight = out.metrics[ours][1].item()
        clips_sequences = "clip" in name and case["config"].get("importance_sampling_level") == "sequence"
        if clips_sequences and weight < num_rows:
            assert case["name"] == "mask_truncated"
            continue
        values[name] = _mean(out.metrics[ours])
    if "policy_loss" in case["metrics"]:
        values["policy_loss"] = out.loss.item() + case["config"]["entropy_coef"] * values["entropy"]
    return values


def _assert_metrics_agree(case: dict, actual: dict[str, float], tolerance: float = 1e-6) -> None:
    checked = set(case["metrics"]) - {"clip_ratio/low_min", "clip_ratio/high_max", "entropy_coef"}
    assert set(actual) == checked or case["name"] == "mask_truncated"
    for name, value in actual.items():
        # TRL sums clip indicators in float32.
        expected = pytest.approx(case["metrics"][name], rel=tolerance, abs=0.1 * tolerance)
        assert value == expected, (name, case["name"], case["config"])


def _assert_same(actual: Tensor | float, expected: Any, *, scale: float, tolerance: float, what: Any) -> None:
    difference = (torch.as_tensor(actual) - torch.as_tensor(expected)).abs().max().item()
    assert difference <= tolerance * scale, f"{what}: off by {difference / scale:.1e} of {scale:.3g}"


def _assert_agrees(case: dict, out: PolicyLoss, gradient: Tensor, dtype: torch.dtype) -> None:
    expected = torch.tensor(case["grad_logps"], dtype=dtype)
    what, tolerance = (case["name"], case["config"]), TOLERANCE[dtype]
    # Positive and negative tokens cancel in the loss. The sum of gradients is what it is made of.
    scale = abs(case["loss"]) if dtype == torch.float64 else 0.0
    scale = scale if scale > 1e-9 else expected.abs().sum().item()
    _assert_same(out.loss.item(), case["loss"], scale=scale, tolerance=tolerance, what=("loss", *what))
    largest = expected.abs().max().item()
    _assert_same(gradient, expected, scale=largest, tolerance=tolerance, what=("gradient", *what))
    norm = case["grad_norm"]
    _assert_same(gradient.norm().item(), norm, scale=norm, tolerance=tolerance, what=("norm", *what))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_agrees_with_trl(name: str, dtype: torch.dtype) -> None:
    for case in (case for case in CASES if case["name"] == name):
        inputs, _ = packed = _packed(case, dtype)
        counts = {"num_sequences": case["n_rows"], "num_tokens": case["num_items_in_batch"]}
        out = _loss(inputs, **counts, options=_options(case))
        out.loss.backward()
        _assert_agrees(case, out, packed.padded(inputs["logprobs"].grad), dtype)
        if "grad_entropies" in case:
            expected = torch.tensor(case["grad_entropies"], dtype=dtype)
            torch.testing.assert_close(packed.padded(inputs["entropies"].grad), expected)
        else:
            assert inputs["entropies"].grad is None
        if dtype == torch.float64:
            _assert_metrics_agree(case, _metrics_as_trl(case, out, case["n_rows"]))


ACCUM = [case for case in CASES if case["name"] == "accum"]


@pytest.mark.parametrize("case", ACCUM, ids=lambda case: "-".join(map(str, case["config"].values())))
def test_micro_batches_as_trl_counts_them(case: dict) -> None:
    config = case["config"]
    steps = config.get("steps_per_generation", 2) / config["gradient_accumulation_steps"]
    metrics, gradients = [], []
    for index, expected in enumerate(case["micro_losses"]):
        inputs, _ = packed = _packed(case, torch.float64, slice(8 * index, 8 * index + 8))
        num_tokens = case["num_items_in_batch"] / steps
        if config["loss_type"] == "bnpo":  # TRL's is a mean over each micro-batch
            num_tokens = inputs["mask"].sum().item() * config["gradient_accumulation_steps"]
        out = _loss(inputs, num_sequences=16 / steps, num_tokens=num_tokens, options=_options(case))
        out.loss.backward()
        assert out.loss.item() == pytest.approx(expected, rel=1e-6)
        metrics.append(_metrics_as_trl(case, out, 8))
        gradients.append(packed.padded(inputs["logprobs"].grad))
    _assert_metrics_agree(case, {name: sum(m[name] for m in metrics) / 2 for name in metrics[0]})
    torch.testing.assert_close(
        torch.cat(gradients), torch.tensor(case["grad_logps"], dtype=torch.float64), rtol=1e-6, atol=1e-9
    )


def _select(inputs: dict[str, Any], rows: Tensor) -> dict[str, Any]:
    """The tokens of some rows as a micro-batch of their own, rows numbered anew."""
    keep = torch.isin(inputs["row"], rows)
    number = torch.empty(inputs["advantages"].numel(), dtype=torch.int64)
    number[rows] = torch.arange(len(rows))
    micro = {name: value if value is None else value[keep] for name, value in inputs.items() if name != "advantages"}
    return micro | {"row": number[micro["row"]], "advantages": inputs["advantages"][rows]}


@pytest.mark.parametrize("sizes", [(16,), (8, 8), (5, 11), (1,) * 16, (2, 3, 4, 7)], ids=str)
@pytest.mark.parametrize("loss_type", TRL_LOSSES)
def test_micro_batches_add_up_to_trl_whatever_the_split(loss_type: str, sizes: tuple[int, ...]) -> None:
    """For bnpo the value of a whole step is dapo's."""
    whole = "dapo" if loss_type == "bnpo" else loss_type
    case = next(c for c in CASES if c["name"] == "accum" and c["config"]["loss_type"] == whole)
    inputs, _ = packed = _packed(case, torch.float64)
    options = _options(case | {"config": case["config"] | {"loss_type": loss_type}})
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    losses = [
        _loss(_select(inputs, rows), num_sequences=16, num_tokens=case["num_items_in_batch"], options=options).loss
        for rows in order.split(list(sizes))
    ]
    total = torch.stack(losses).sum()
    total.backward()
    assert total.item() == pytest.approx(case["loss"], rel=1e-6)
    expected = torch.tensor(case["grad_logps"], dtype=torch.float64)
    torch.testing.assert_close(packed.padded(inputs["logprobs"].grad), expected, rtol=1e-6, atol=1e-9)


EVERYTHING = {
    "beta": 0.04,
    "off_policy_mask_threshold": 0.01,
    "top_entropy_quantile": 0.3,
    "entropy_coef": 0.05,
    "sampler_correction": "token_truncate",
}


def test_a_small_divergence_is_not_lost_in_rounding() -> None:
    """exp(d) - d - 1 in float32 has an error of about 1e-7 for a divergence of 5e-9, of either sign."""
    logprobs = torch.full((8,), -1.0, requires_grad=True)
    far = torch.tensor([1e-4, -1e-4, 3e-4, -3e-4, 2e-4, -2e-4, 1e-3, -1e-3])
    out = _one_row(
        [0.0] * 8, 0.0, loss_options(beta=0.1), logprobs=logprobs, ref_logprobs=-1.0 + far,
        mask=torch.ones(8), advantages=torch.zeros(1), old_logprobs=torch.full((8,), -1.0),
    )  # fmt: skip
    exact = float(((far.double() ** 2) / 2).mean())
    assert _mean(out.metrics["kl_reference"]) == pytest.approx(exact, rel=2e-3)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_all_options_at_once_add_up(loss_type: str, level: str) -> None:
    """Also the entropy quantile, given the threshold and count of the whole step; and every metric."""
    case = next(c for c in CASES if c["name"] == "accum") | {"use_vllm": True, "nan_sampling": True}
    inputs, _ = _packed(case | {"tool_mask": True}, torch.float64)
    options = loss_options(loss_type=loss_type, importance_sampling_level=level, **EVERYTHING)
    counts = {"num_sequences": 16, "num_tokens": inputs["mask"].sum().item(), "options": options}
    whole = _loss(inputs, **counts)
    (gradient,) = torch.autograd.grad(whole.loss, inputs["logprobs"])

    threshold = high_entropy_threshold(inputs["entropies"], mask=inputs["mask"], top_quantile=0.3)
    reached = ((inputs["entropies"] >= threshold) & (inputs["mask"] > 0)).sum().item()
    counts |= {"entropy_threshold": threshold, "num_high_entropy_tokens": reached}
    counts["covariance"] = covariance_cut(gather_terms(**inputs, options=options), options)
    parts = [_loss(_select(inputs, rows), **counts) for rows in torch.arange(16).split([3, 1, 7, 5])]
    total = torch.stack([part.loss for part in parts]).sum()
    torch.testing.assert_close(total, whole.loss)
    torch.testing.assert_close(torch.autograd.grad(total, inputs["logprobs"])[0], gradient)
    for name, pair in whole.metrics.items():
        torch.testing.assert_close(sum(part.metrics[name] for part in parts), pair, msg=name)
        assert pair.shape == (2,) and not pair.requires_grad and pair.isfinite().all()


@cache
def _scored_by_tiny_model(temperature: float) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Parameters, and logprobs and entropies [T] of the first 8 rows: one forward pass for all cases."""
    from transformers import Qwen2ForCausalLM

    model = Qwen2ForCausalLM.from_pretrained(GOLDEN / "tiny_model", dtype=torch.float32)
    sequences = [
        prompt + completion
        for prompt, completion in zip(FIXTURE["prompt_ids"][:8], FIXTURE["completion_ids"][:8], strict=True)
    ]
    width = max(map(len, sequences))
    ids = torch.tensor([sequence + [FIXTURE["pad_id"]] * (width - len(sequence)) for sequence in sequences])
    logits = model(input_ids=ids).logits[:, :-1] / temperature  # pads are on the right: causality hides them
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    position = torch.arange(1, width)
    start = torch.tensor([len(prompt) for prompt in FIXTURE["prompt_ids"][:8]])[:, None]
    end = torch.tensor([len(sequence) for sequence in sequences])[:, None]
    completion = (position >= start) & (position < end)
    return tuple(model.parameters()), chosen[completion], entropies[completion]


@pytest.mark.parametrize("loss_type", TRL_LOSSES)
def test_agrees_with_trl_through_a_model(loss_type: str) -> None:
    cases = [c for c in CASES if c["name"] == "model" and c["config"]["loss_type"] == loss_type]
    assert len(cases) == 6
    for case in cases:
        parameters, logprobs, entropies = _scored_by_tiny_model(case["config"]["temperature"])
        inputs = _packed(case, torch.float32).inputs | {"logprobs": logprobs, "entropies": entropies}
        counts = {"num_sequences": 8, "num_tokens": case["num_items_in_batch"]}
        out = _loss(inputs, **counts, options=_options(case))
        gradients = torch.autograd.grad(out.loss, parameters, retain_graph=True)
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm().item()
        assert norm == pytest.approx(case["param_grad_norm"], rel=1e-5), case["config"]
        assert out.loss.item() == pytest.approx(case["loss"], rel=1e-5, abs=1e-6), case["config"]
        _assert_metrics_agree(case, _metrics_as_trl(case, out, 8), tolerance=1e-5)


def _one_row(log_ratio: list[float], advantage: float, options: AlgorithmConfig, **keywords: Any) -> PolicyLoss:
    logprobs = torch.full((len(log_ratio),), -1.0, dtype=torch.float64, requires_grad=True)
    inputs = {
        "logprobs": logprobs,
        "row": torch.zeros(len(log_ratio), dtype=torch.int64),
        "mask": torch.ones(len(log_ratio), dtype=torch.float64),
        "advantages": torch.tensor([advantage], dtype=torch.float64),
        "old_logprobs": -1.0 - torch.tensor(log_ratio, dtype=torch.float64),
        "num_sequences": 1,
        "num_tokens": len(log_ratio),
        "options": options,
    }
    out = policy_loss(**(inputs | keywords))
    out.loss.backward()
    return PolicyLoss(out.loss, out.metrics | {"gradient": logprobs.grad})


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "moves"),
    [
        (1.5, 1.0, -1.2, False),  # above the bound and pushed further up: cut off
        (1.5, -1.0, 1.5, True),  # above the bound and pulled back: must move (a maximum here would not)
        (0.5, -1.0, 0.8, False),
        (0.5, 1.0, -0.5, True),
    ],
)
def test_clip_is_pessimistic_for_either_sign(ratio: float, advantage: float, loss: float, moves: bool) -> None:
    out = _one_row([math.log(ratio)], advantage, loss_options())
    assert out.loss.item() == pytest.approx(loss)
    assert (out.metrics["gradient"].abs().item() > 0) is moves
    assert _mean(out.metrics["clipped_fraction"]) == (not moves)
    assert _mean(out.metrics["mean_ratio"]) == pytest.approx(ratio)
    assert _mean(out.metrics["mean_kl"]) == pytest.approx(ratio - 1 - math.log(ratio))


def test_mask_mode_with_a_minimum_does_mask() -> None:
    """A clamp after masking would lift the zeros to the minimum again."""
    options = loss_options(sampler_correction="token_mask", sampler_correction_min=0.5)
    sampled = torch.tensor([-1.0, -4.0, 1.0, math.nan], dtype=torch.float64)  # ratios 1, e^3, e^-2, unknown
    out = _one_row([0.0] * 4, -1.0, options, sampling_logprobs=sampled)
    assert out.metrics["gradient"].tolist() == [0.25, 0.0, 0.0, 0.25]
    assert _mean(out.metrics["sampling_ratio"]) == 0.5


@pytest.mark.parametrize(
    ("sampled", "advantage", "kept"),
    [
        ([-0.5, -0.5], -1.0, False),
        ([-0.5, -0.5], 1.0, True),
        ([-0.85, -0.95], -1.0, True),
        ([-0.85, math.nan], -1.0, True),  # a mean of 0.075: the unknown token is no sign of drift
    ],
)
def test_off_policy_mask_measures_against_the_sampler(sampled: list[float], advantage: float, kept: bool) -> None:
    options = loss_options(off_policy_mask_threshold=0.11, sampler_correction="none")
    values = torch.tensor(sampled, dtype=torch.float64)
    out = _one_row([0.0, 0.0], advantage, options, sampling_logprobs=values)
    assert out.loss.item() == (-advantage if kept else 0.0)


def test_masks_leave_the_kl_term() -> None:
    options = loss_options(off_policy_mask_threshold=0.1, beta=0.1, use_bias_correction_kl=False)
    reference = torch.tensor([-2.0, 0.0], dtype=torch.float64)
    out = _one_row([-1.0, -1.0], -1.0, options, ref_logprobs=reference)
    k3 = (math.exp(-1) + 1 - 1 + math.exp(1) - 1 - 1) / 2
    assert out.loss.item() == pytest.approx(0.1 * k3)
    assert _mean(out.metrics["kl_reference"]) == pytest.approx(k3)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_tokens_that_do_not_count_may_be_anything(loss_type: str, level: str) -> None:
    case = next(c for c in CASES if c["name"] == "tool_mask") | {"use_vllm": True}
    inputs, _ = _packed(case, torch.float64)
    options = loss_options(loss_type=loss_type, importance_sampling_level=level, **EVERYTHING)
    counts = {"num_sequences": 8, "num_tokens": inputs["mask"].sum().item(), "options": options}
    expected = _loss(inputs, **counts)
    (gradient,) = torch.autograd.grad(expected.loss, inputs["logprobs"])

    hole = inputs["mask"] == 0
    names = ("old_logprobs", "sampling_logprobs", "ref_logprobs", "entropies", "logprobs")
    for value in (-math.inf, math.inf, math.nan, 1e4):
        broken = inputs | {name: inputs[name].masked_fill(hole, value) for name in names}
        out = _loss(broken, **counts)
        assert out.loss.item() == expected.loss.item()
        assert torch.equal(torch.autograd.grad(out.loss, inputs["logprobs"])[0], gradient)
        assert all(torch.equal(out.metrics[name], pair) for name, pair in expected.metrics.items())


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_unknown_old_logprobs_are_the_current_ones(loss_type: str) -> None:
    case = next(c for c in CASES if c["name"] == "core")
    inputs, _ = _packed(case, torch.float64)
    options = loss_options(loss_type=loss_type)
    counts = {"num_sequences": 8, "num_tokens": 57, "options": options}
    absent = _loss(inputs, old_logprobs=None, **counts)
    unknown = _loss(inputs, old_logprobs=torch.full_like(inputs["old_logprobs"], math.nan), **counts)
    assert unknown.loss.item() == absent.loss.item()
    gradients = [torch.autograd.grad(out.loss, inputs["logprobs"])[0] for out in (absent, unknown)]
    assert torch.equal(*gradients) and gradients[0].abs().sum() > 0
    assert _mean(absent.metrics["mean_ratio"]) == 1.0 and _mean(absent.metrics["mean_kl"]) == 0.0


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_advantages_per_token_and_tokens_in_any_order(loss_type: str) -> None:
    case = next(c for c in CASES if c["name"] == "core")
    inputs, _ = _packed(case, torch.float64)
    options = loss_options(loss_type=loss_type, off_policy_mask_threshold=0.01)
    counts = {"num_sequences": 8, "num_tokens": 57, "options": options}
    expected = _loss(inputs, **counts).loss
    per_token = inputs["advantages"][inputs["row"]]
    torch.testing.assert_close(_loss(inputs, advantages=per_token, **counts).loss, expected)
    order = torch.randperm(57, generator=torch.Generator().manual_seed(2))
    shuffled = {name: value[order] for name, value in inputs.items() if value is not None and name != "advantages"}
    out = _loss(shuffled, advantages=inputs["advantages"], **counts)
    torch.testing.assert_close(out.loss, expected)


def test_one_token_a_row() -> None:
    """With as many rows as tokens the advantages are those of rows, whatever the order of the tokens."""
    zeros = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    row, advantages = torch.tensor([2, 0, 1]), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    counts = {"num_sequences": 3, "num_tokens": 3, "options": loss_options()}
    policy_loss(zeros, row=row, mask=torch.ones(3), advantages=advantages, **counts).loss.backward()
    torch.testing.assert_close(zeros.grad, -advantages[row] / 3)


@pytest.mark.parametrize("num_tokens", [0, 4], ids=["no tokens", "all masked"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_micro_batch_without_a_token_that_counts(loss_type: str, level: str, num_tokens: int) -> None:
    values = torch.full((num_tokens,), -1.0, requires_grad=True)
    options = loss_options(loss_type=loss_type, importance_sampling_level=level, **EVERYTHING)
    given = ("old_logprobs", "sampling_logprobs", "ref_logprobs", "entropies")
    out = policy_loss(
        values,
        row=torch.zeros(num_tokens, dtype=torch.int64),
        mask=torch.zeros(num_tokens),
        advantages=torch.tensor([1.0, -1.0]),
        num_sequences=2,
        num_tokens=10,
        options=options,
        max_completion_length=16,
        **{name: values.detach() - 1 for name in given},
    )
    out.loss.backward()
    assert out.loss.item() == 0.0 and not values.grad.any()
    assert all(pair.tolist() == [0.0, 0.0] for pair in out.metrics.values())


class _CountOperations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_the_default_loss_is_lean() -> None:
    """It runs thousands of times on small models, where each operation costs the same whatever its size."""
    inputs, _ = _packed(next(c for c in CASES if c["name"] == "core"), torch.float32)
    with _CountOperations() as operations:
        _loss(inputs, num_sequences=8, num_tokens=57, options=loss_options())
    assert operations.count <= 70


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"options": loss_options(beta=0.1), "ref_logprobs": None},
            ConfigError,
            "beta=0.1 needs ref_logprobs",
        ),
        ({"options": loss_options(entropy_coef=0.1), "entropies": None}, ConfigError, "need entropies"),
        (
            {"options": loss_options(top_entropy_quantile=0.2), "entropies": None},
            ConfigError,
            "need entropies",
        ),
        ({"options": loss_options(loss_type="dr_grpo"), "max_completion_length": None}, ConfigError, "not set"),
        ({"mask": torch.ones(3)}, TrainingError, r"mask of shape \(3,\)"),
        ({"row": torch.zeros(3, dtype=torch.int64)}, TrainingError, r"row of shape \(3,\)"),
        ({"old_logprobs": torch.zeros(57, 1)}, TrainingError, r"old_logprobs of shape \(57, 1\)"),
    ],
)
def test_missing_and_misshapen_inputs_are_refused(changes: dict, error: type[Exception], message: str) -> None:
    inputs, _ = _packed(next(c for c in CASES if c["name"] == "vllm_is"), torch.float32)
    with pytest.raises(error, match=message):
        _loss({"options": loss_options(), "num_sequences": 8, "num_tokens": 57} | inputs | changes)


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "ppo"},
        {"importance_sampling_level": "row"},
        {"sampler_correction": "clip"},
        {"epsilon": -0.1},
        {"epsilon_high": math.inf},
        {"beta": math.nan},
        {"delta": 0},
        {"top_entropy_quantile": 1.1},
        {"entropy_coef": math.inf},
        {"off_policy_mask_threshold": math.nan},
        {"sapo_temperature_neg": 0.0},
        {"kl_reference": "old"},
        {"ref_mixup_alpha": 0.0},
        {"ref_mixup_alpha": 1.5},
        {"ref_sync_steps": 0},
    ],
    ids=str,
)
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    """Before a model is loaded, with the line of the file: the section that the loss reads checks itself."""
    sections = {"run": {"steps": 1}, "model": {"path": "a"}, "data": {"path": "a"}, "rewards": {"functions": ["a.b"]}}
    with pytest.raises(ConfigError) as caught:
        validate(Document("run.yaml", sections | {"algorithm": options}))
    assert f"algorithm.{next(iter(options))}" in str(caught.value)
    assert "expected" in str(caught.value)


def test_cispo_has_a_bound_of_its_own() -> None:
    assert [AlgorithmConfig(loss_type=name).upper_epsilon for name in ("cispo", "grpo")] == [5.0, 0.2]
    assert AlgorithmConfig(loss_type="cispo", epsilon_high=3.0).upper_epsilon == 3.0


def test_every_name_has_its_loss() -> None:
    assert tuple(LOSS_TYPES) == get_args(AlgorithmConfig.model_fields["loss_type"].annotation)
