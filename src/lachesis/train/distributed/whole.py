"""Whole parameters of a policy whose model is sharded, and a whole model that an engine in this process has."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lachesis.bridges.extract import Whole, as_it_is
from lachesis.train.model.loading import LoadedModel
from lachesis.train.policy import Policy


@dataclass(frozen=True, slots=True)
class WholeModel:
    """A model that was loaded as the policy's was."""

    loaded: LoadedModel

    @torch.no_grad()
    def take(self, policy: Policy) -> None:
        """Copy what the policy has learned, in place."""
        own = dict(self.loaded.model.named_parameters())
        for name, parameter in policy.model.named_parameters():
            if parameter.requires_grad:
                own[name].copy_(policy.whole(parameter))


def whole_of(policy: Policy) -> Whole:
    """What makes a parameter of the policy whole before it travels."""
    return policy.whole if policy.strategy.sharded else as_it_is
