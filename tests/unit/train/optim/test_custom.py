"""Optimizers by import path inside of ours."""

from __future__ import annotations

import logging

import pytest
import torch

from lachesis.common.errors import ConfigError
from lachesis.config.schema import OptimizerConfig
from lachesis.train.optim.optimizer import PolicyOptimizer, build_optimizer


def build(config: OptimizerConfig, weight: torch.nn.Parameter) -> PolicyOptimizer:
    return build_optimizer([("weight", weight)], config, learning_rate=0.5, total_steps=4)


def test_a_class_of_torch_steps_as_it_does_alone():
    given = {"function": "torch.optim.SGD", "kwargs": {"momentum": 0.9}}
    ours, alone = (torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    optimizer = build(OptimizerConfig(function=given, max_grad_norm=None), ours)
    reference = torch.optim.SGD([alone], lr=0.5, momentum=0.9)
    for scale in (1.0, 2.0):
        for weight in (ours, alone):
            weight.grad = torch.full((2, 2), scale)
        optimizer.step()
        reference.step()
    assert torch.equal(ours, alone)


def test_its_state_fits_another_of_its_kind_only():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    state = build(OptimizerConfig(function="torch.optim.SGD"), weight).state_dict()
    assert (state["kind"], state["implementation"]) == ("custom", "SGD")
    build(OptimizerConfig(function="torch.optim.SGD"), weight).load_state_dict(state)
    with pytest.raises(Exception, match="does not fit: its implementation is 'SGD', but this run's is 'Adam'"):
        build(OptimizerConfig(function="torch.optim.Adam"), weight).load_state_dict(state)


def test_what_is_no_optimizer_is_refused(caplog: pytest.LogCaptureFixture):
    weight = torch.nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ConfigError, match=r"'torch\.nn\.Linear' is no Optimizer"):
        build(OptimizerConfig(function="torch.nn.Linear"), weight)
    with caplog.at_level(logging.WARNING, "lachesis"):
        build(OptimizerConfig(function="torch.optim.SGD", eps=1e-6), weight)
    assert "optimizer.eps does nothing: the optimizer torch.optim.SGD takes no eps from it" in caplog.text
