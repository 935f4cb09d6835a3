from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lachesis.common.errors import ConfigError
from lachesis.rollouts.tools.parsers import ToolCall
from lachesis.rollouts.tools.toolbox import Observation, Tool, Toolbox, load_tools

TOOLS = '''
def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b

def undescribed(a):
    return a
'''


def tool(function) -> Tool:
    return Tool(function.__name__, function, {})


def add(a: int, b: int = 1) -> int:
    return a + b


def fail(why: str) -> str:
    raise ValueError(why)


async def sleep(seconds: float) -> dict[str, float]:
    await asyncio.sleep(seconds)
    return {"slept": seconds}


@pytest.fixture
def toolbox() -> Iterator[Toolbox]:
    box = Toolbox([tool(add), tool(fail), tool(sleep)], timeout_s=0.5)
    yield box
    asyncio.run(box.stop())


PICTURE = Image.new("RGB", (4, 4), "red")
AN_IMAGE = {"type": "image", "path": "red.png"}


@pytest.mark.parametrize(
    ("said", "parts"),
    [
        (PICTURE, [{"type": "image", "image": PICTURE}]),
        (AN_IMAGE, [AN_IMAGE]),
        (["look", PICTURE, {"type": "text", "text": "here"}],
         [{"type": "text", "text": "look"}, {"type": "image", "image": PICTURE}, {"type": "text", "text": "here"}]),
        (("look", {"type": "image", "image": PICTURE}, 3),
         [{"type": "text", "text": "look"}, {"type": "image", "image": PICTURE}, {"type": "text", "text": "3"}]),
        ([AN_IMAGE, AN_IMAGE], [AN_IMAGE, AN_IMAGE]),
        (["look", {"type": "text", "text": "here"}], ()),
        ({"type": "file", "path": "red.png"}, ()),
    ],
)  # fmt: skip
def test_images_of_an_answer_are_parts_of_a_message(said: Any, parts: Any):
    def look() -> Any:
        return said

    (one,) = call_all(Toolbox([tool(look)], timeout_s=5, shows_images=True), [ToolCall("look")])
    assert one.parts == parts
    assert bool(one.text) != bool(parts)
    blind = Toolbox([tool(look)], timeout_s=5)
    if "PIL" in repr(said):
        with pytest.raises(ConfigError, match="'look' answered with an image, but the model is not shown images"):
            call_all(blind, [ToolCall("look")])
    else:  # a description of a file is a text for a model of text
        assert call_all(blind, [ToolCall("look")])[0].text


def call_all(box: Toolbox, calls: Sequence[ToolCall]) -> list[Observation]:
    return asyncio.run(box.call_all(calls))


def test_calls_are_answered_in_their_order(toolbox: Toolbox):
    found = call_all(
        toolbox, [ToolCall("add", {"a": 1, "b": 2}), ToolCall("sleep", {"seconds": 0}), ToolCall("add", {"a": 4})]
    )
    assert [(one.text, one.failed) for one in found] == [("3", False), ('{"slept": 0}', False), ("5", False)]
    assert found[0].message() == {"role": "tool", "name": "add", "content": "3"}


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (ToolCall("fail", {"why": "no"}), "error: ValueError: no"),
        (ToolCall("subtract", {}), "error: there is no tool 'subtract'; there are add, fail, sleep"),
        (ToolCall("add", {"c": 1}), "error: add: missing a required argument: 'a'"),
        (ToolCall("add", error="the call is not JSON"), "error: the call is not JSON"),
        (ToolCall("sleep", {"seconds": 60}), "error: the call took longer than 0.5 s"),
    ],
)
def test_errors_are_answers_too(toolbox: Toolbox, call: ToolCall, text: str):
    bad, good = call_all(toolbox, [call, ToolCall("add", {"a": 1})])
    assert (bad.text, bad.failed) == (text, True)
    assert (good.text, good.failed) == ("2", False)


def test_calls_run_at_the_same_time():
    meeting = threading.Barrier(3)

    def meet() -> str:
        meeting.wait(5)
        return "met"

    box = Toolbox([tool(meet)], timeout_s=10)
    started = time.monotonic()
    assert [one.text for one in call_all(box, [ToolCall("meet")] * 3)] == ["met"] * 3
    assert time.monotonic() - started < 5
    asyncio.run(box.stop())


def test_quick_calls_take_turns_on_one_thread(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lachesis.rollouts.tools.toolbox._QUICK_S", 5.0)  # this machine may be busy
    threads: list[int] = []

    def note() -> None:
        threads.append(threading.get_ident())

    class Counting(Toolbox):
        handed_over = 0

        def _begin(self, calls: Any) -> Any:
            self.handed_over += 1
            return super()._begin(calls)

    box = Counting([tool(note)], timeout_s=5)
    call_all(box, [ToolCall("note")] * 100)
    assert (len(threads), len(set(threads)), box.handed_over) == (100, 1, 1)
    asyncio.run(box.stop())


def test_no_more_slow_calls_at_once_than_there_may_be(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lachesis.rollouts.tools.toolbox._AT_ONCE", 4)
    under_way: set[int] = set()
    most: list[int] = []

    def slow(number: int) -> int:
        under_way.add(number)
        most.append(len(under_way))
        time.sleep(0.02)
        under_way.remove(number)
        return number

    box = Toolbox([tool(slow)], timeout_s=5)
    found = call_all(box, [ToolCall("slow", {"number": number}) for number in range(10)])
    assert [one.text for one in found] == [str(number) for number in range(10)]
    assert 1 < max(most) <= 4
    asyncio.run(box.stop())


def test_what_a_tool_changes_is_its_own():
    def append(to: list[int]) -> str:
        to.append(1)
        return str(to)

    box = Toolbox([tool(append)], timeout_s=5)
    call = ToolCall("append", {"to": [0]})
    assert [one.text for one in call_all(box, [call, call])] == ["[0, 1]"] * 2
    asyncio.run(box.stop())


def test_calls_behind_a_slow_one_are_made_once():
    made: list[int] = []

    def note(number: int) -> None:
        made.append(number)
        time.sleep(0.03 * (number == 1))

    box = Toolbox([tool(note)], timeout_s=5)
    call_all(box, [ToolCall("note", {"number": number}) for number in range(8)])
    assert sorted(made) == list(range(8))
    asyncio.run(box.stop())


def test_each_call_has_the_whole_limit_however_many_hang():
    """One that hangs keeps the others waiting for milliseconds, and each of them may take as long itself."""
    hang = threading.Event()
    box = Toolbox([tool(add), tool(sleep), Tool("hang", lambda: hang.wait(5), {})], timeout_s=0.1)
    calls = [ToolCall("hang"), ToolCall("add", {"a": 1}), ToolCall("hang"), ToolCall("sleep", {"seconds": 0.02})]
    started = time.monotonic()
    found = [one.text for one in call_all(box, [*calls, ToolCall("hang")])]
    assert time.monotonic() - started < 0.5
    late = "error: the call took longer than 0.1 s"
    assert found == [late, "2", late, '{"slept": 0.02}', late]
    hang.set()
    assert [one.text for one in call_all(box, calls[1:2])] == ["2"]
    asyncio.run(box.stop())


class TestLoading:
    def test_a_tool_is_described_by_docstring_and_types(self, tmp_path: Path):
        (tmp_path / "mine.py").write_text(TOOLS)
        (found,) = load_tools(["mine.py:add"], tmp_path)
        described = found.schema["function"]
        assert (found.name, described["description"]) == ("add", "Add two numbers.")
        assert described["parameters"]["properties"]["a"] == {"type": "integer", "description": "The first."}
        assert described["parameters"]["required"] == ["a"]

    def test_one_without_a_docstring(self, tmp_path: Path):
        (tmp_path / "mine.py").write_text(TOOLS)
        with pytest.raises(ConfigError, match="cannot be described"):
            load_tools(["mine.py:undescribed"], tmp_path)

    def test_two_of_one_name(self, tmp_path: Path):
        (tmp_path / "mine.py").write_text(TOOLS)
        with pytest.raises(ConfigError, match="two tools are called 'add'"):
            load_tools(["mine.py:add", "mine.py:add"], tmp_path)
