"""The example of an environment with a tool: its turns, and a calculator that calculates and nothing else."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from examples.environments.calculator import Calculator, calculate, problem_of

from lachesis.common.errors import DataError
from lachesis.common.types import SamplingParams
from tests.unit.plugins.atropos.environments.one import TOKENIZER, ids, served


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*7", "84"), ("(1+2)*3 - -4", "13"), ("7/2", "3.5"), ("1/3", "0.3333333333"), ("7//2", "3"),
        ("2**10", "1024"), (" 1,000 + 1 ", "1001"), ("10 % 4", "2"), ("0.1+0.2", "0.3"), ("6/3", "2"),
    ],
)  # fmt: skip
def test_values(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "", "x", "__import__('os')", "(1).real", "[1]", "1 if 2 else 3", "True", "'a'*3", "1/0", "9**9**9**9",
        "10**64*10**64", "(-1)**0.5", "lambda: 1", "1;2", "1" * 201, "(" * 90 + "1", "2**0.5**-1000000", "1j", "0**-1",
        "\0", "1e400",
    ],
)  # fmt: skip
def test_refusals_are_quick_and_short(expression):
    started = time.thread_time()
    with pytest.raises(DataError) as caught:
        calculate(expression)
    assert time.thread_time() - started < 5  # seconds of work: some of these would take years
    assert len(caught.value.message) < 60


class TestTurns:
    """Several turns with a tool."""

    def collect(self, *turns: Sequence[int], **config: Any) -> tuple[Any, list[Any], Any]:
        rest = list(turns)
        with served(Calculator, lambda prompt, n, body: [rest.pop(0)], **config) as (fake, run):

            async def work(environment: Calculator) -> Any:
                item = problem_of(4)
                trajectory = await environment.collect_trajectory(item, params=SamplingParams(max_tokens=900))
                (score,) = await environment.score(item, [trajectory])
                return trajectory, score, environment.metrics()

            trajectory, score, values = run(work)
        assert not rest
        return trajectory, fake.bodies, (score, values)

    def test_turns(self):
        answer = problem_of(4).answer
        # The first turn's last token goes beyond the call, as a real tokenizer's may.
        first, last = ids("I try <calc>2*3</calc>\n", end=False), ids(f"so <answer>{answer}</answer>", end=False)
        trajectory, bodies, (score, values) = self.collect(first, last)
        output = TOKENIZER.encode("<result>6</result>")
        prompt = bodies[0]["prompt"]["prompt_token_ids"]
        assert trajectory.tokens == [*prompt, *first, *output, *last]
        assert bodies[1]["prompt"]["prompt_token_ids"] == [*prompt, *first, *output]
        assert trajectory.masks == [-100] * len(prompt) + first + [-100] * len(output) + last
        assert [value == 1.0 for value in trajectory.logprobs] == [mask == -100 for mask in trajectory.masks]
        assert bodies[0]["stop"] == ["</calc>", "</answer>"]
        assert score == 1.0
        assert values["calculator/calls"] == 1 and values["calculator/failed_calls"] == 0

    def test_errors_of_the_tool_are_shown_to_the_model(self):
        trajectory, _, (score, values) = self.collect(ids("<calc>1/0</calc>", end=False), ids("no idea"))
        assert trajectory.messages[2] == {"role": "tool", "content": "<result>error: division by zero</result>"}
        assert (score, values["calculator/failed_calls"]) == (0.0, 1)

    def test_the_model_cannot_write_results_itself(self):
        answer = problem_of(4).answer
        trajectory, _, (score, _) = self.collect(ids("<calc>1</calc><result>5</result> hm"))
        assert score == 0.0 and len(trajectory.messages) == 2
        # An answer that the tool wrote is none.
        _, _, (score, _) = self.collect(ids(f"<calc><answer>{answer}</answer></calc>", end=False), ids("done"))
        assert score == 1.0

    def test_turns_end(self):
        call = ids("<calc>1+1</calc>", end=False)
        trajectory, bodies, _ = self.collect(call, call, max_turns=2)
        assert len(bodies) == 2 and trajectory.messages[-1]["role"] == "assistant"

    def test_room_ends(self):
        call = ids("<calc>1+1</calc>", end=False)
        _, bodies, _ = self.collect(call, ids("x"))
        prompt = len(bodies[0]["prompt"]["prompt_token_ids"])
        trajectory, bodies, _ = self.collect(call, max_token_length=prompt + len(call) + 5)
        assert len(trajectory.tokens) == prompt + len(call)
        assert bodies[0]["max_tokens"] == len(call) + 5
