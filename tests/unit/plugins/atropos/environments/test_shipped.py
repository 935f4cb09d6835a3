"""The shipped environments: prompts, rollouts, scores."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
from collections.abc import Sequence
from typing import Any

import pytest

from lachesis.common.errors import ConfigError, DataError
from lachesis.plugins.atropos.environments.base import endless, together
from lachesis.plugins.atropos.environments.shipped.arithmetic import Arithmetic, problems
from lachesis.plugins.atropos.environments.shipped.gsm8k import MathProblem, load_split
from tests.paths import EXAMPLES
from tests.unit.plugins.atropos.environments.one import TOKENIZER, gsm8k, ids, one_group, served

QUICKSTART = EXAMPLES / "quickstart" / "setup.py"


def test_arithmetic_has_the_problems_of_the_quickstart():
    spec = importlib.util.spec_from_file_location("quickstart_setup", QUICKSTART)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for ours, theirs in zip(problems(seed=0), module.problems(seed=0), strict=True):
        assert [{"prompt": one.prompt, "answer": one.answer} for one in ours] == theirs


def right_sum(prompt: list[int]) -> str:
    a, b = TOKENIZER.decode(prompt).rstrip("=").split("+")
    return str(int(a) + int(b))[::-1]


def test_arithmetic_group():
    def answer(prompt: list[int], n: int, body: Any) -> Sequence[Sequence[int]]:
        right = right_sum(prompt)
        return [ids(right), ids(right, end=False), ids(right + "0"), ids("")]

    with served(Arithmetic, answer, group_size=4) as (fake, run):
        item, group = run(one_group)
    assert group.scores == [1.0, 1.0, 0.0, 0.0]
    prompt = TOKENIZER.encode(item.prompt)
    assert group.tokens[0][: len(prompt)] == prompt and group.masks[0][: len(prompt)] == [-100] * len(prompt)
    assert group.overrides[0] == {"finish_reason": "stop", "weight_version": {"first": 0, "last": 0}}
    assert (fake.bodies[0]["n"], fake.bodies[0]["max_tokens"]) == (4, 6)


def test_reasoning_gym_asks_and_scores_as_its_tasks_do():
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    from lachesis.plugins.atropos.environments.shipped.reasoning_gym import ReasoningGym

    def answer(prompt: list[int], n: int, body: Any) -> Sequence[Sequence[int]]:
        a, operator, b = TOKENIZER.decode(prompt).rsplit(":", 1)[1].rstrip("= ").split()
        right = str(int(a) + int(b) if operator == "+" else int(a) - int(b))
        return [ids(right), ids("none")][:n]

    tasks = "chain_sum?size=4&max_terms=2&max_digits=1&min_terms=2&min_digits=1"
    with served(ReasoningGym, answer, group_size=2, tasks=tasks, eval_num=3, max_token_length=120) as (_, run):
        _, group = run(one_group)
        result = run(lambda environment: environment.evaluate())
    assert (group.scores[0], group.scores[1] < 0.1) == (1.0, True)
    assert (result.problems, result.accuracy) == (3, 1.0)


def test_evaluation_is_greedy_on_held_out_problems():
    def answer(prompt: list[int], n: int, body: Any) -> Sequence[Sequence[int]]:
        return [ids(right_sum(prompt) if TOKENIZER.decode(prompt) in easy else "x")]

    easy = {one.prompt for one in problems(seed=0)[1][:3]}
    with served(Arithmetic, answer, eval_num=12) as (fake, run):
        result = run(lambda environment: environment.evaluate())
    assert (result.problems, result.accuracy, result.mean_reward) == (12, 0.25, 0.25)
    assert {body["temperature"] for body in fake.bodies} == {0.0}


def test_a_prompt_without_room():
    with served(Arithmetic, None, max_token_length=4) as (_, run), pytest.raises(DataError, match="leaves no room"):
        run(one_group)


def test_order_is_seeded_and_without_repeats():
    first, again = endless(range(5), seed=1), endless(range(5), seed=1)
    taken = [next(first) for _ in range(10)]
    assert taken == [next(again) for _ in range(10)]
    assert sorted(taken[:5]) == sorted(taken[5:]) == list(range(5))
    assert list(endless([], seed=0)) == []


class TestGsm8k:
    """Data and scores."""

    def test_files(self, tmp_path):
        expected = MathProblem("What is 2 times 1,000?", "2000")
        data = gsm8k(tmp_path / "data")
        assert load_split(str(data), "train")[1] == expected
        assert len(load_split(str(data), "test")) == 1
        assert load_split(str(data / "train.jsonl"), "test")[1] == expected

    def test_parquet_as_on_the_hub(self, tmp_path):
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        rows = [json.loads(line) for line in (gsm8k(tmp_path / "a") / "train.jsonl").read_text().splitlines()]
        (tmp_path / "b" / "main").mkdir(parents=True)
        table = pyarrow.Table.from_pylist(rows)
        parquet.write_table(table, tmp_path / "b" / "main" / "train-00000-of-00001.parquet")
        assert load_split(str(tmp_path / "b"), "train") == load_split(str(tmp_path / "a"), "train")

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("train.jsonl", '{"question": "x", "answer": "y"}', "line 1: not a GSM8K problem"),
            ("train.jsonl", "[1]", "line 1: a list, not an object"),
            ("train.jsonl", "{", "line 1: malformed JSON"),
            ("train.jsonl", "", "train.jsonl is empty"),
            ("train.parquet", "{", "not a readable Parquet file"),
            ("other.jsonl", "", "has no file of the split train"),
        ],
    )
    def test_faults(self, tmp_path, name, content, message):
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match=message):
            load_split(str(tmp_path), "train")

    def test_nothing_there(self, tmp_path):
        with pytest.raises(DataError, match="there is no GSM8K at"):
            load_split(str(tmp_path / "absent"), "train")


def test_an_error_ends_the_rollouts_beside_it():
    async def work() -> list[str]:
        ended: list[str] = []

        async def waits() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("waits")

        async def fails() -> None:
            raise DataError("odd")

        with pytest.raises(DataError, match="odd"):
            await together([waits(), fails()])
        return ended

    assert asyncio.run(work()) == ["waits"]


def test_no_held_out_problems():
    class Bare(Arithmetic):
        def held_out(self) -> Sequence[Any]:
            return ()

    with served(Bare, None) as (_, run), pytest.raises(ConfigError, match="no held-out problems"):
        run(lambda environment: environment.evaluate())
