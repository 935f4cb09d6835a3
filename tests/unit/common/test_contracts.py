"""Parts of the user's own: which signatures fit a contract, what is given, and who is named where one fails."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest

from lachesis.common.contracts import Part, contract, load_part
from lachesis.common.errors import ConfigError, EngineError, TrainingError


class Scale(Protocol):
    def __call__(self, values: list[int], *, factor: int, step: int) -> Any: ...


class Thing(ABC):
    @abstractmethod
    def run(self) -> int: ...


SCALE = contract("scale", Scale, error=TrainingError)
THING = contract("thing", Scale, error=EngineError, makes=Thing, methods=("run",))
Load = Callable[..., Part]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def write(text: str, wanted: Any = SCALE, **kwargs: Any) -> Part:
        (tmp_path / "mine.py").write_text(text)
        spec = f"{tmp_path / 'mine.py'}:f"
        return load_part({"function": spec, "kwargs": kwargs} if kwargs else spec, wanted)

    return write


@pytest.mark.parametrize(
    ("signature", "expected"),
    [
        ("values", {}),
        ("values, step", {"step": 7}),
        ("values, *, factor, step=0", {"factor": 3, "step": 7}),
        ("values, **rest", {"factor": 3, "step": 7}),
        ("*values", {}),
        ("anything, extra=1", {"extra": 1}),
    ],
)
def test_it_is_given_what_it_names(load: Load, signature: str, expected: dict[str, Any]):
    part = load(f"def f({signature}):\n    return locals()\n")
    seen = part([1], factor=3, step=7)
    rest = seen.pop("rest", {})
    found = seen | rest
    assert {name: value for name, value in found.items() if name not in ("values", "anything")} == expected


def test_kwargs_are_given_beside_and_in_place_of_what_the_contract_gives(load: Load):
    part = load(
        "def f(values, *, factor, offset):\n    return [v * factor + offset for v in values]\n", factor=2, offset=1
    )
    assert part([1, 2], factor=100, step=0) == [3, 5]


@pytest.mark.parametrize(
    ("text", "kwargs", "message"),
    [
        ("def f():\n    pass\n", {}, r"takes no values -> write it as def scale\(values, \*, factor, step\)"),
        ("def f(values, faktor):\n    pass\n", {}, "'faktor', which a scale does not get -> did you mean factor"),
        ("def f(values, zzz):\n    pass\n", {}, "'zzz', which a scale does not get -> it may take: factor, step"),
        ("def f(values, offset):\n    pass\n", {"ofset": 1}, "needs an argument 'offset'"),
        ("def f(values, offset=1):\n    pass\n", {"ofset": 1}, "takes no argument 'ofset'.*did you mean offset"),
        ("f = 3\n", {}, "a int, no function"),
        ("raise OSError('away')\n", {}, r"importing it raised OSError: away \(mine.py:1\)"),
    ],
)
def test_what_cannot_be_called_so_is_refused(load: Load, text: str, kwargs: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        load(text, **kwargs)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class f:\n    pass\n", "is no Thing"),
        (
            "from tests.unit.common.test_contracts import Thing\nclass f(Thing):\n    def __init__(self, v): pass\n",
            "lacks methods of a Thing: run",
        ),
    ],
)
def test_a_class_has_to_be_one_of_its_kind_and_whole(load: Load, text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        load(text, THING)


def test_what_a_part_makes_is_checked_and_its_methods_name_it(load: Load):
    with pytest.raises(ConfigError, match=r"the thing \S*mine.py:f made a int, no Thing"):
        load("def f(values):\n    return 3\n", THING).make([])
    thing = load(
        "from tests.unit.common.test_contracts import Thing\n"
        "class f(Thing):\n    def __init__(self, values):\n        self.values = values\n\n"
        "    def run(self):\n        return self.values[5]\n",
        THING,
    ).make([1])
    with pytest.raises(EngineError, match=r"the thing \S*mine.py:f raised IndexError: .*\(mine.py:7\)"):
        thing.run()


def test_an_error_of_ours_passes_as_it_is_and_others_name_the_line(load: Load):
    own = load("from lachesis.common.errors import EngineError\ndef f(values):\n    raise EngineError('mine')\n")
    with pytest.raises(EngineError, match=r"^mine$"):
        own([])
    with pytest.raises(TrainingError, match=r"the scale \S*mine.py:f raised ZeroDivisionError: .*\(mine.py:2\)"):
        load("def f(values):\n    return 1 / 0\n")([])


def test_a_name_without_a_dot_is_an_entry_point():
    with pytest.raises(ConfigError, match=r"'mine' is not an entry point of the group lachesis\.scale"):
        load_part("mine", SCALE)
