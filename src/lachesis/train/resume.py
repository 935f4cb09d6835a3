"""Checkpoints of a run: everything that makes it go on as if it had never stopped."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from lachesis.common.errors import CheckpointError
from lachesis.pipeline.feed import Feed
from lachesis.train.batch import Batch
from lachesis.train.checkpoint import Checkpoint, CheckpointManager, capture_rng, restore_rng
from lachesis.train.policy import Policy

logger = logging.getLogger("lachesis")


class RunCheckpoints:
    """Saves weights, optimizer, schedule, random generators and data position; restores them exactly.

    Args:
        manager: where they go.
        policy, feed: whose state it is.
        every_steps: how often; 0 only when the run is asked to stop.
    """

    def __init__(self, manager: CheckpointManager, *, policy: Policy, feed: Feed[Batch], every_steps: int) -> None:
        self._manager = manager
        self._policy = policy
        self._feed = feed
        self._every_steps = every_steps

    def maybe_save(self, step: int, *, stopping: bool = False) -> None:
        """Save if step N·every_steps is done or the run stops.

        Raises:
            CheckpointError: it could not be written; the last one is untouched.
        """
        if stopping or (self._every_steps > 0 and step % self._every_steps == 0):
            self._manager.save(
                step,
                tensors=self._policy.weights(),
                state={
                    "optimizer": self._policy.optimizer_state(),
                    "rng": capture_rng(),
                    "policy": self._policy.state_dict(),
                },
                meta={"step": step, "feed": self._feed.state_dict()},
            )

    def restore(self) -> int:
        """Load the newest good checkpoint and return its step; 0 where there is none.

        Raises:
            CheckpointError: it belongs to another model, or its place in the data is one of another source.
        """
        step = self._manager.latest()
        if step is None:
            logger.warning("there is no checkpoint to resume from: the run starts at step 1")
            return 0
        checkpoint = self._manager.load(step)
        self._load_weights(checkpoint)
        self._policy.load_optimizer_state(checkpoint.state["optimizer"])
        self._policy.load_state_dict(checkpoint.state["policy"])
        try:
            self._feed.load_state_dict(checkpoint.meta["feed"])
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"the checkpoint of step {step} has no place in the data that this run could go on at "
                f"({type(error).__name__} {error})",
                remedy="resume with the source, the pipeline settings and the version that the run was started with",
            ) from error
        restore_rng(checkpoint.state["rng"])
        return step

    def _load_weights(self, checkpoint: Checkpoint) -> None:
        own: dict[str, Tensor] = {n: p for n, p in self._policy.model.named_parameters() if p.requires_grad}
        _require_same(own, checkpoint.tensors, step=checkpoint.step)
        self._policy.load_weights(checkpoint.tensors)


def _require_same(own: dict[str, Tensor], saved: dict[str, Any], *, step: int) -> None:
    different = [n for n in own.keys() | saved.keys() if n not in own or n not in saved]
    different += [n for n in own.keys() & saved.keys() if own[n].shape != saved[n].shape]
    if different:
        raise CheckpointError(
            f"the checkpoint of step {step} is of another model: {len(different)} tensors differ, among them "
            f"{sorted(different)[0]}",
            remedy="resume with the model and adapter settings that the run was started with",
        )
