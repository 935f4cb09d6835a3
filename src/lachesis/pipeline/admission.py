"""Admission of groups: which may be generated now, and which finished ones form the next batch.

No threads, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from lachesis.common.group_codec import decode_group, encode_group
from lachesis.common.types import Group, Prompt
from lachesis.rollouts.base import Draw


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a group in line, from its admission until the step that trains on it is done.

    ``number`` counts admissions. ``batch`` is the number of batches done at its admission, and ``tries`` the number of
    groups in this place that were put aside before. ``group`` is the finished group, and None until then.
    """

    number: int
    batch: int
    draw: Draw
    tries: int = 0
    group: Group | None = None


class Admission:
    """Bound on the age of groups at training, enforced by when each group may begin.

    A group holds one of ``(1 + ahead) * size`` slots from its admission until the step on it is done. A batch is the
    ``size`` oldest finished groups, so a slow one does not hold up the others; it is ready if all remaining groups,
    in their order, could still be trained on in time. So a group that is admitted when d batches are done is in batch
    d + ``ahead`` at the latest (batches counted from 0), and every admitted group is trained on.

    Args:
        size: groups of a batch.
        ahead: batches that may be generated ahead; with 0 the groups of a batch are those admitted for it.
    """

    def __init__(self, *, size: int, ahead: int) -> None:
        if size < 1 or ahead < 0:
            raise ValueError(f"size must be at least 1 and ahead at least 0, got {size} and {ahead}")
        self.size, self.ahead = size, ahead
        self._places: dict[int, Place] = {}
        self._numbers = count()
        self._taken = self._done = 0  # batches

    @property
    def capacity(self) -> int:
        """Return the number of slots."""
        return (1 + self.ahead) * self.size

    @property
    def room(self) -> int:
        """Return the number of groups that may be admitted now."""
        in_training = (self._taken - self._done) * self.size
        return max(0, self.capacity - in_training - len(self._places))

    @property
    def finished(self) -> list[Place]:
        """Return the places whose group is finished, oldest first."""
        return [place for place in self._places.values() if place.group is not None]

    @property
    def unfinished(self) -> list[Place]:
        """Return the places whose group is not finished yet, oldest first."""
        return [place for place in self._places.values() if place.group is None]

    @property
    def _next_batch(self) -> list[Place]:
        """Return the places whose groups would form the next batch if it were taken now."""
        return self.finished[: self.size]

    def admit(self, draws: Sequence[Draw], *, tries: int = 0) -> list[Place]:
        """Add places at the end of the line (at most ``room`` of them) and return them."""
        if len(draws) > self.room:
            raise ValueError(f"{len(draws)} groups cannot be admitted to {self.room} free slots")
        places = [Place(next(self._numbers), self._done, draw, tries) for draw in draws]
        self._places |= {place.number: place for place in places}
        return places

    def finish(self, number: int, group: Group) -> None:
        """Record the finished group of the place with this number."""
        self._places[number] = replace(self._places[number], group=group)

    def leave(self, number: int) -> None:
        """Give up the place with this number and free its slot."""
        del self._places[number]

    def ready(self) -> bool:
        """Return True if the next batch can be taken."""
        chosen = self._next_batch
        if len(chosen) < self.size:
            return False
        numbers = {place.number for place in chosen}
        rest = [place for place in self._places.values() if place.number not in numbers]
        # The first `size` of the rest would be in the batch after this one, the next in the one after that.
        in_time = all(self._taken + 1 + i // self.size <= place.batch + self.ahead for i, place in enumerate(rest))
        # Waiting is useless if all groups are finished, for example after a resume with a smaller `ahead`.
        return in_time or not self.unfinished

    def take(self) -> list[Group]:
        """Take the groups of the next batch, which has to be ready, in the order of their admission."""
        chosen = self._next_batch
        for place in chosen:
            del self._places[place.number]
        self._taken += 1
        return [place.group for place in chosen if place.group is not None]

    def train(self) -> None:
        """Record that the batch taken last was trained on, and free its slots."""
        self._done = self._taken

    def state_dict(self) -> dict[str, Any]:
        """Return the line in order, with the groups that are finished; JSON-serializable."""
        return {"taken": self._taken, "done": self._done, "places": [_encode(one) for one in self._places.values()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._taken, self._done = int(state["taken"]), int(state["done"])
        places = [_decode(line) for line in state["places"]]
        self._places = {place.number: place for place in places}
        self._numbers = count(max(self._places, default=-1) + 1)


def prompts_in_line(state: Mapping[str, Any]) -> list[Prompt]:
    """Return the prompts of :meth:`Admission.state_dict`, in order."""
    return [_decode(line).draw.prompt for line in state["places"]]


def _encode(place: Place) -> dict[str, Any]:
    group = place.group or Group(prompt=place.draw.prompt, samples=())
    line = {"number": place.number, "batch": place.batch, "request": place.draw.request, "tries": place.tries}
    return line | {"finished": place.group is not None, "group": encode_group(group)}


def _decode(line: Mapping[str, Any]) -> Place:
    group = decode_group(line["group"])
    draw = Draw(group.prompt, int(line["request"]))
    finished = group if line["finished"] else None
    return Place(int(line["number"]), int(line["batch"]), draw, int(line["tries"]), finished)
