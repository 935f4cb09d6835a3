"""Several teachers in one run: each row learns from its source's, however the step is cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lachesis.common.types import Group
from lachesis.config.schema import TeacherConfig
from lachesis.train.batch import pack
from lachesis.train.losses.teacher import TeacherOfEach, shares, shares_by_source
from lachesis.train.policy import Policy
from tests.losses import loss_options
from tests.tiny import tiny_model
from tests.unit.train.drifted import drifted_groups
from tests.unit.train.test_policy import make_policy, without_advantage

SOURCES = ("chat", "math", "none")


def of_sources(names: tuple[str, ...] = SOURCES) -> list[Group]:
    """A group of each source, without a signal from rewards."""
    found = without_advantage(drifted_groups(tiny_model().double(), groups=len(names)))
    return [replace(group, prompt=replace(group.prompt, source=name)) for group, name in zip(found, names, strict=True)]


def model(seed: int) -> Any:
    return tiny_model(seed=seed).double().requires_grad_(False)


def gradient(policy: Policy, groups: list[Group], *, max_tokens: int = 1 << 20, **options: Any) -> torch.Tensor:
    batch = pack(groups, max_tokens=max_tokens, **options)
    policy.accumulate(batch)
    return torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])


def with_one(seed: int, only: str, section: TeacherConfig) -> torch.Tensor:
    """The gradient of one teacher that has a weight for the groups of one source alone."""
    policy = make_policy(options=loss_options(loss_type="dapo", teacher=section), teachers={"": model(seed)})
    weigh = shares(section)
    return gradient(
        policy,
        of_sources(),
        shares=lambda group: weigh(group) if group.prompt.source == only else weigh(group)._replace(teacher=0.0),
    )


@pytest.mark.parametrize("max_tokens", [1 << 20, 40], ids=["whole", "cut"])
@pytest.mark.parametrize("together", [False, True], ids=["alone", "with ranks"])
def test_each_source_learns_from_its_own_teacher(max_tokens: int, together: bool):
    sections = {
        "chat": TeacherConfig(model="a", weight=0.5, beta=0.0),
        "math": TeacherConfig(model="b", weight=2.0, estimate="sampled"),
    }
    policy = make_policy(
        options=loss_options(loss_type="dapo", teachers=sections), teachers={"chat": model(1), "math": model(2)}
    )
    assert isinstance(policy.teacher, TeacherOfEach)
    policy.teacher.together = together  # then each teacher meets other ranks in every pass
    found = gradient(policy, of_sources(), max_tokens=max_tokens, shares=shares_by_source(sections))
    expected = with_one(1, "chat", sections["chat"]) + with_one(2, "math", sections["math"])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert found.abs().max() > 1e-3


def test_a_pass_has_one_teacher():
    sections = {"chat": TeacherConfig(model="a"), "math": TeacherConfig(model="b", reward_weight=0.0)}
    batch = pack(of_sources(("math", "chat", "none", "chat")), max_tokens=1 << 20, shares=shares_by_source(sections))
    numbers = sorted((micro.teacher, micro.teacher_weights.unique().tolist()) for micro in batch.micro_batches)
    assert numbers == [(0, [1.0]), (1, [1.0]), (2, [0.0])]


def test_one_model_may_teach_several_sources():
    sections = {name: TeacherConfig(model="a") for name in ("chat", "math")}
    same = model(1)
    options = loss_options(loss_type="dapo", teachers=sections)
    policy = make_policy(options=options, teachers={"chat": same, "math": same})
    found = gradient(policy, of_sources(), shares=shares_by_source(sections))
    expected = with_one(1, "chat", sections["chat"]) + with_one(1, "math", sections["math"])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
