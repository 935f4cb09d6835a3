"""Checkpoints of a run: when one is saved, its content, and how the run resumes from it."""

from __future__ import annotations

import copy
import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lachesis.common.deadline import Deadline, Retry, wait_until
from lachesis.common.errors import CheckpointError, ConfigError, LachesisError
from lachesis.metrics.values import Mean, MetricValue
from lachesis.process.threads import begin
from lachesis.train.checkpoint import Checkpoint, CheckpointManager, capture_rng, restore_rng
from lachesis.train.host_memory import HostMemory, host_copy

if TYPE_CHECKING:
    from lachesis.pipeline.feed import Feed
    from lachesis.train.batch import Batch
    from lachesis.train.policy import Policy

logger = logging.getLogger("lachesis")

# The minimum of seconds between checkpoints if their cost sets the interval: less work than this is soon repeated.
LEAST_S = 30.0
# Bytes a second at which the first checkpoint of a run is expected to be written, until one has been measured.
EXPECTED_SPEED = 1e9
# Seconds between two checks if all ranks have written their parts: the first interval, and the longest.
_LOOK_S = (0.005, 0.5)


class Save(ABC):
    """Checkpoint that is being written."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Return the seconds since a copy of the state was complete."""
        return time.perf_counter() - self._began

    @abstractmethod
    def written(self) -> bool:
        """Return True if :meth:`finish` has nothing to wait for."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until the checkpoint is complete. Raises CheckpointError if it failed."""


class WholeSave(Save):
    """Save by this process, in a thread, or when it is waited for."""

    def __init__(self, save: Callable[[], object], *, ahead: bool) -> None:
        super().__init__()
        self._save = save
        # If the process is ended at once, nothing waits for this save, and the previous checkpoint remains.
        self._saving = begin(save, name="checkpoint") if ahead else None

    def written(self) -> bool:
        return self._saving is not None and self._saving.done()

    def finish(self) -> None:
        if self._saving is None:
            self._save()
        else:
            self._saving.result()


class SaveInParts(Save):
    """Save by all ranks, each its part.

    Args:
        manager, policy, step: what is saved.
        state, meta: content that is saved whole.
        copied: as :meth:`Policy.begin_parts`.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        policy: Policy,
        *,
        step: int,
        state: Mapping[str, Any],
        meta: Mapping[str, Any],
        copied: bool,
    ) -> None:
        self._policy = policy
        with ExitStack() as stack:
            self._draft = stack.enter_context(manager.saving(step, needed=policy.parts_bytes()))
            in_parts = policy.begin_parts(str(self._draft.parts.absolute()), copied)
            rest = {**state["policy"], "reference": in_parts["reference"]}
            self._draft.write(state={**state, "optimizer": in_parts["optimizer"], "policy": rest}, meta=meta)
            self._open = stack.pop_all()
        super().__init__()

    def written(self) -> bool:
        with self._discarded_on_error():
            return self._policy.parts_written()

    def finish(self) -> None:
        # Ranks do not wait for the slowest in a collective, because that has a time limit, and a disk has none.
        wait = Deadline("the trainer waiting for all ranks to write their parts of a checkpoint", None)
        first_s, longest_s = _LOOK_S
        with wait.waiting():
            wait_until(
                lambda: "" if self.written() else "parts are being written",
                Retry(wait, first_s=first_s, longest_s=longest_s),
            )
        with self._open:
            self._draft.describe(parts=self._policy.finish_parts())

    @contextmanager
    def _discarded_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._open.__exit__(type(error), error, error.__traceback__)
            raise


class Budget:
    """Time budget of checkpoints, so that saving takes at most a share of the run's time.

    The next checkpoint is due once the last one's delay of training is at most ``share`` of the time since then, and
    all delays together at most ``share`` of the whole time. The first one's cost is estimated from its size; a slow
    disk takes several times that.

    Args:
        share: largest share of the time; 0 without checkpoints.
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, share: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._clock = clock
        self._since = self._start = clock()
        self._cost: float | None = None
        self._spent = 0.0

    def due(self, num_bytes: Callable[[], int]) -> bool:
        """Return True if one may be saved now; the first is of ``num_bytes``."""
        passed = self._clock() - self._since
        if self._share <= 0 or passed < LEAST_S:
            return False
        if self._cost is None:
            self._cost = num_bytes() / EXPECTED_SPEED
        whole = self._clock() - self._start
        return self._cost <= self._share * passed and self._spent + self._cost <= self._share * whole

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measure the cost of a checkpoint that the block saves."""
        began = self._clock()
        yield
        self._since = self._clock()
        self._cost = self._since - began
        self._spent += self._cost

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Add the later cost of the last checkpoint: the block waits until it is written."""
        began = self._clock()
        yield
        if self._cost is not None:
            self._cost += self._clock() - began
            self._spent += self._clock() - began


@dataclass(eq=False)
class RunCheckpoints:
    """Checkpoints of a run, which save and restore weights, optimizer, schedule, random generators and data position.

    Args:
        manager: writer of the checkpoints.
        policy, feed: sources of the state.
        every_steps: interval in steps; 0 saves only on a stop, or as ``max_share`` allows.
        max_share: largest share of the time for saving, if that sets the interval; else 0.
        asked: returns True if a checkpoint is requested now.
        asynchronous: continue training as soon as there is a copy in host memory.
        whole: let one process write everything, even if the policy is sharded.
    """

    manager: CheckpointManager
    _: KW_ONLY
    policy: Policy
    feed: Feed[Batch]
    every_steps: int
    max_share: float = 0.0
    asked: Callable[[], bool] = lambda: False
    asynchronous: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        self._budget = Budget(self.max_share)
        self._in_parts = self.policy.strategy.sharded and not self.whole
        self._writing: Save | None = None
        self._write_time: float | None = None
        self._host_memory, self._reserved = HostMemory(), False

    def require_shared_disk(self) -> None:
        """Raise ConfigError if ranks must write into one directory but do not share it."""
        if not self._in_parts:
            return
        seen = self.manager.directory.parent.absolute() / f".seen-by-ranks-{secrets.token_hex(4)}"
        seen.touch()
        try:
            if not self.policy.sees(str(seen)):
                raise ConfigError(
                    f"all ranks must write into the run directory {seen.parent}, but some rank cannot see it",
                    remedy="put run.dir on a disk that all nodes share, or set checkpoint.format: whole",
                )
        finally:
            seen.unlink()

    def maybe_save(self, step: int, *, stopping: bool = False, recorded: Callable[[], object] = lambda: None) -> None:
        """Save if step N·every_steps is done, ``max_share`` allows it, the run stops, or a checkpoint was requested.

        Args:
            step: the last one that is done.
            stopping: the run ends with it.
            recorded: called before saving; returns once all records of the run's steps are written.

        Raises:
            CheckpointError: this checkpoint or the one before could not be written; the last good one is untouched.
        """
        due = step % self.every_steps == 0 if self.every_steps > 0 else self._budget.due(self._num_bytes)
        wanted = self.asked() or stopping or due
        if self.asynchronous and not wanted:
            self._reserve()
        self._save(step, wanted=wanted, waits=stopping, recorded=recorded)

    def save_if_asked(self, step: int, *, recorded: Callable[[], object] = lambda: None) -> None:
        """Save step N if a checkpoint was requested since the last one.

        Raises as :meth:`maybe_save`.
        """
        self._save(step, wanted=self.asked(), recorded=recorded)

    def _reserve(self) -> None:
        """Allocate memory for the first copy beside the steps before it, once all of the state exists."""
        if self._reserved:
            return
        self._reserved = True
        if self._in_parts:
            self.policy.reserve_copies()
        else:
            self._host_memory.reserve(self._held())

    def _num_bytes(self) -> int:
        """Return the size of a checkpoint in bytes."""
        if self._in_parts:
            return self.policy.parts_bytes()
        return sum(leaf.nbytes for leaf in self._held())

    def _held(self) -> Iterator[Tensor]:
        held = (self.policy.weights(), self.policy.optimizer_state(), self.policy.reference_state())
        return (leaf for leaf in tree_leaves(held) if isinstance(leaf, Tensor))

    def _save(self, step: int, *, wanted: bool, recorded: Callable[[], object], waits: bool = False) -> None:
        if wanted or (self._writing is not None and self._writing.written()):
            with self._budget.finishing():
                self.wait()
        if wanted:
            with self._budget.saving():
                recorded()
                self._writing = self._begin(step)
                if waits or not self.asynchronous:
                    self.wait()

    def wait(self) -> None:
        """Wait until the current save is complete.

        Raises CheckpointError if it failed.
        """
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.finish()
            self._write_time = writing.seconds
            self.feed.saved()

    @contextmanager
    def completed(self) -> Iterator[None]:
        """Complete the current save after the block, also after an error if possible.

        Raises:
            CheckpointError: it cannot be completed.
        """
        try:
            yield
        except Exception:
            try:
                self.wait()
            except LachesisError as lost:
                logger.warning("the unfinished checkpoint is lost: %s", lost.message)
            raise
        self.wait()

    def take_metrics(self) -> dict[str, MetricValue]:
        """Return metrics of a checkpoint that was finished in the background since the last call."""
        seconds, self._write_time = self._write_time, None
        return {} if seconds is None or not self.asynchronous else {"checkpoint_write_time": Mean(seconds)}

    def _begin(self, step: int) -> Save:
        policy = self.policy
        rest: dict[str, Any] = {"old_logprobs": policy.old_logprobs(), "kl_weight": policy.kl_weight.value}
        state: dict[str, Any] = {"rng": capture_rng(), "policy": rest}
        meta = {"step": step, "feed": self.feed.state_dict()}
        if self._in_parts:
            copied = self.asynchronous
            return SaveInParts(self.manager, self.policy, step=step, state=state, meta=meta, copied=copied)
        rest["reference"] = self.policy.reference_state()
        state["optimizer"] = self.policy.optimizer_state()
        content: dict[str, Any] = {"tensors": self.policy.weights(), "state": state}
        if self.asynchronous:
            self._host_memory.wait()
            content, meta = _copied(content), copy.deepcopy(meta)
        return WholeSave(lambda: self.manager.save(step, **content, meta=meta), ahead=self.asynchronous)

    def restore(self) -> int:
        """Load the newest good checkpoint and return its step; 0 if there is none.

        Raises:
            CheckpointError: it belongs to another model or another source of data, or every checkpoint is damaged.
        """
        step = self.manager.newest()
        if step is None:
            logger.warning("there is no checkpoint to resume from: the run starts at step 1")
            return 0
        checkpoint = self.manager.load(step, parts=self.policy.strategy.sharded)
        _require_same(self.policy.model, checkpoint)
        self._load(checkpoint)
        try:
            self.feed.load_state_dict(checkpoint.meta["feed"])
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"the checkpoint of step {step} does not say where in this run's data to continue "
                f"({type(error).__name__} {error})",
                remedy="resume with the source, pipeline settings and version with which the run was started",
            ) from error
        restore_rng(checkpoint.state["rng"])
        return step

    def _load(self, checkpoint: Checkpoint) -> None:
        policy, state = self.policy, checkpoint.state
        if checkpoint.parts is not None:
            in_parts = {**state["policy"], "optimizer": state["optimizer"], "old_logprobs": []}
            policy.load_parts(str(checkpoint.parts.absolute()), in_parts)
            policy.load_old_logprobs(state["policy"]["old_logprobs"])
            return
        policy.load_weights(checkpoint.tensors)
        policy.load_optimizer_state(state["optimizer"])
        policy.load_state_dict(state["policy"])


def _require_same(model: nn.Module, checkpoint: Checkpoint) -> None:
    own = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
    saved = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    different = sorted(name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name))
    if different:
        raise CheckpointError(
            f"the checkpoint of step {checkpoint.step} is of another model: {len(different)} tensors differ, such as "
            f"{different[0]}",
            remedy="resume with the model and adapter settings with which the run was started",
        )


@torch.no_grad()
def _copied(content: Any) -> Any:
    """Return the content with copies of all tensors in host memory; repeated tensors are copied once."""
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in copies or not tensor.numel():
            copies[key] = host_copy(tensor.detach())
        return copies[key]

    result = tree_map_only(Tensor, copied, content)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return result
