"""The protocol: bytes of a request become checked records, or a refusal.

Values are converted to types as in the original ("3" is 3, 2.0 is 2, true is 1). Unlike there, no number may be NaN or
infinite, a list reports only its first fault, and faulty input is quoted only in part.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from lachesis.common.errors import DataError
from lachesis.common.json_values import is_list, is_object
from lachesis.plugins.atropos.api.entries import StoredGroup
from lachesis.plugins.atropos.api.scored_group import FirstFault, Int64, ScoredGroup, WireRecord, why_unusable

Record = TypeVar("Record", bound="WireRecord")
Parsed = TypeVar("Parsed")
_ECHO = 100

# Lachesis's own headers; others' clients send none of them and notice nothing.
TRAINER_HEADER = "X-Lachesis-Trainer"
HOLDS_HEADER = "X-Lachesis-Holds"
KEY_HEADER = "Idempotency-Key"

# Bounds of what is computed with. The cost of a plan grows with the sizes, and a share must not overflow.
BatchSize = Annotated[int, Field(ge=1, le=1 << 17)]
GroupSize = Annotated[int, Field(ge=1, le=1 << 14)]
Share = Annotated[float, Field(ge=-1e9, le=1e9)]


class Refusal(DataError):
    """Refusal of a request, which leaves the state unchanged.

    Args:
        detail: the value of the key ``detail``, or plain text if ``plain`` is set.
    """

    def __init__(
        self,
        status: int,
        detail: str | Sequence[Mapping[str, Any]],
        *,
        plain: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail if isinstance(detail, str) else str(detail[0].get("msg", "")))
        self.status = status
        self.detail = detail
        self.plain = plain
        self.headers = dict(headers or {})

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep all attributes when pickled between processes."""
        return functools.partial(Refusal, plain=self.plain, headers=self.headers), (self.status, self.detail)


@dataclass(frozen=True, slots=True)
class WrongGroup:
    """A group of a list that cannot be used. ``reason`` names the field, index and fault."""

    reason: str


class Registration(WireRecord):
    """A trainer's POST /register. ``acknowledge`` is Lachesis's own: the trainer acknowledges batches."""

    wandb_group: str
    wandb_project: str
    batch_size: BatchSize
    max_token_len: Int64
    checkpoint_dir: str
    save_checkpoint_interval: Int64
    starting_step: Int64
    num_steps: Int64
    acknowledge: bool = False


class EnvRegistration(WireRecord):
    """An environment's POST /register-env."""

    max_token_length: Int64
    desired_name: str
    weight: Share
    group_size: GroupSize
    min_batch_allocation: Share | None = None


class EnvIdentifier(WireRecord):
    """The body of GET /status-env and POST /disconnect-env."""

    env_id: Int64


class Goodbye(EnvIdentifier):
    """The body of POST /disconnect-env. ``reason`` is Lachesis's own: what ended the environment."""

    reason: str = ""


class TrainerIdentifier(WireRecord):
    """Lachesis's own POST /disconnect: the trainer ends."""

    uuid: int


class Acknowledgement(WireRecord):
    """Lachesis's own POST /batch/ack: batches that the trainer has and will not ask for again."""

    uuid: int
    batch_ids: FirstFault[Int64]


def _or_wrong(value: Any, validate: ValidatorFunctionWrapHandler) -> ScoredGroup | WrongGroup:
    try:
        return validate(value)
    except ValidationError as error:
        return _wrong(_fault(error.errors(include_url=False)[0]))


_MANY = TypeAdapter(FirstFault[ScoredGroup])
# The most groups that are told apart: to name the faults of millions of them would take minutes.
_MOST = 100_000
_EACH = TypeAdapter(Annotated[list[Annotated[ScoredGroup, WrapValidator(_or_wrong)]], Field(max_length=_MOST)])
_FREE_FIELDS = ("messages", "generation_params", "overrides", "group_overrides", "images")


def parse_group(body: bytes, *, check: bool) -> StoredGroup:
    """Parse the group of POST /scored_data; with ``check``, its ``problem`` says why no trainer could use it.

    Raises:
        Refusal: 422, naming the field and index of the fault.
    """
    return _compact(_validated(ScoredGroup.model_validate_json, body), check=check, loc=())


def parse_groups(body: bytes, *, check: bool) -> list[StoredGroup]:
    """Parse the groups of POST /scored_data_list: all of them, or none.

    Raises:
        Refusal: 422, naming the group, field and index of the fault.
    """
    return [
        _compact(data, check=check, loc=(index,)) for index, data in enumerate(_validated(_MANY.validate_json, body))
    ]


def parse_each(body: bytes, *, check: bool) -> list[StoredGroup | WrongGroup]:
    """Parse the groups of POST /scored_data_list, each by itself. Slower than :func:`parse_groups`.

    Raises:
        Refusal: 422, the body is not a list, or is one of more than 100,000.
    """
    parsed: list[StoredGroup | WrongGroup] = []
    for index, data in enumerate(_validated(_EACH.validate_json, body)):
        if isinstance(data, WrongGroup):
            parsed.append(data)
            continue
        try:
            parsed.append(_compact(data, check=check, loc=(index,)))
        except Refusal as refusal:
            assert not isinstance(refusal.detail, str)
            fault = dict(refusal.detail[0])
            parsed.append(_wrong(fault | {"loc": ["body", *fault["loc"][2:]]}))
    return parsed


def _wrong(fault: Mapping[str, Any]) -> WrongGroup:
    return WrongGroup(f"{fault['msg']}{_at(fault['loc'][1:])}")


def parse_record(kind: type[Record], body: bytes) -> Record:
    """Any other record.

    Raises:
        Refusal: 422, naming the field.
    """
    return _validated(kind.model_validate_json, body)


def _validated(validate: Callable[[bytes], Parsed], body: bytes) -> Parsed:
    if not body:
        raise Refusal(422, [{"type": "missing", "loc": ["body"], "msg": "Field required", "input": None}])
    try:
        return validate(body)
    except ValidationError as error:
        raise Refusal(422, [_fault(fault) for fault in error.errors(include_url=False)]) from error


def _compact(data: ScoredGroup, *, check: bool, loc: tuple[int, ...]) -> StoredGroup:
    json = data.__pydantic_serializer__.to_json(data)
    # Free-form values may contain NaN or infinity, unlike typed fields. Searching for the words is cheap; as they may
    # be part of a text, a hit is followed by a walk over the values.
    free = [name for name in _FREE_FIELDS if getattr(data, name) is not None]
    if free and (b"NaN" in json or b"Infinity" in json):
        _refuse_non_finite(data, free, loc)
    return StoredGroup(
        json=json,
        sequences=len(data.tokens),
        tokens=sum(map(len, data.tokens)),
        env_id=data.env_id,
        score=_mean(data.scores),
        problem=why_unusable(data) if check else "",
    )


def _mean(scores: Sequence[float]) -> float | None:
    mean = sum(scores) / len(scores) if scores else math.inf
    return mean if math.isfinite(mean) else None


def _refuse_non_finite(data: ScoredGroup, names: Sequence[str], loc: tuple[int, ...]) -> None:
    for name in names:
        for path, number in _numbers(getattr(data, name), (name,)):
            if not math.isfinite(number):
                fault = {
                    "type": "finite_number",
                    "loc": ["body", *loc, *path],
                    "msg": "Input should be a finite number",
                    "input": str(number),
                }
                raise Refusal(422, [fault])


def _numbers(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], float]]:
    if isinstance(value, float):
        yield path, value
    elif is_object(value):
        for key, part in value.items():
            yield from _numbers(part, (*path, key))
    elif is_list(value):
        for index, part in enumerate(value):
            yield from _numbers(part, (*path, index))


def _fault(fault: Any) -> dict[str, Any]:
    """Return a fault in the form of the original's replies."""
    if fault["type"] == "json_invalid":
        reason = fault["ctx"]["error"]
        return {
            "type": "json_invalid",
            "loc": ["body"],
            "msg": f"JSON decode error: {reason}",
            "input": {},
            "ctx": {"error": reason},
        }
    return {"type": fault["type"], "loc": ["body", *fault["loc"]], "msg": fault["msg"], "input": _echo(fault["input"])}


def _at(path: Sequence[str | int]) -> str:
    if not path:
        return ""
    head, *rest = path
    return f" at {head}" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in rest)


def _echo(value: Any) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return value if len(value) <= _ECHO else f"{value[:_ECHO]}..."
    return f"<{type(value).__name__}>"
