"""Problems with several operations, solved over several turns with a calculator.

The model writes ``<calc>12*7</calc>``; the environment appends ``<result>84</result>`` and lets it continue, until it
writes ``<answer>84</answer>``, ends, or has no turns left. Tokens stay exactly as they were sampled; the environment's
text is not trained on.

lachesis env examples/environments/calculator.py:Calculator process --openai.base_url http://127.0.0.1:9001
"""

from __future__ import annotations

import ast
import math
import operator
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from lachesis.environments.base import Environment
from lachesis.environments.records import Trajectory
from lachesis.environments.settings import EnvironmentConfig
from lachesis.environments.tokenizer import chat_prompt, text_of
from pydantic import Field

from lachesis.common.errors import DataError
from lachesis.common.types import SamplingParams

_INSTRUCTION = (
    "Work out the problem. You have a calculator: write an expression as <calc>12*7</calc>, and its value follows as "
    "<result>84</result>. Give the final number as <answer>84</answer>."
)
_CALL_END, _ANSWER_END = "</calc>", "</answer>"
_CALL = re.compile(r"<calc>((?:(?!<calc>).)*?)</calc>\s*\Z", re.DOTALL)
_HELD_OUT = 256
_LONGEST_EXPRESSION = 200
_LARGEST_NUMBER = 1e15
_LARGEST_EXPONENT = 64
_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


@dataclass(frozen=True, slots=True)
class Problem:
    """An expression in words, and its value as text."""

    question: str
    answer: str


class CalculatorConfig(EnvironmentConfig):
    """The section ``env`` of ``calculator``."""

    max_token_length: int = Field(1024, ge=1, description="most tokens of a rollout, prompt included")
    max_turns: int = Field(4, ge=1, description="most times that the model is asked in a rollout")


class Calculator(Environment[Problem, CalculatorConfig]):
    """A score of 1 where the first final answer is the value, else 0."""

    name = "calculator"
    config_class = CalculatorConfig

    async def setup(self) -> None:
        self._calls, self._failed_calls, self._rollouts = 0, 0, 0
        # Odd numbers are held out, even ones trained on.
        self._held_out = [problem_of(2 * index + 1) for index in range(_HELD_OUT)]
        self._numbers = _numbers(self.config.max_num, seed=self.config.seed)

    async def get_next_item(self) -> Problem:
        return problem_of(2 * next(self._numbers))

    def held_out(self) -> Sequence[Problem]:
        return self._held_out[: self.config.eval_num]

    async def collect_trajectory(self, item: Problem, *, params: SamplingParams) -> Trajectory:
        """Play the model's turns, each but the last followed by the value of its call."""
        asked = f"{_INSTRUCTION}\n\n{item.question}"
        trajectory = Trajectory(messages=[{"role": "user", "content": asked}])
        trajectory.give(chat_prompt(self.tokenizer, trajectory.messages, plain=f"{asked}\n"))
        self._rollouts += 1
        for turn in range(self.config.max_turns):
            limit = self.room(len(trajectory.tokens), params)
            turn_params = replace(params, max_tokens=limit, stop=(_CALL_END, _ANSWER_END))
            (sampled,) = await self.client.generate(trajectory.tokens, params=turn_params)
            trajectory.sample(sampled)
            text = text_of(self.tokenizer, sampled.token_ids)
            trajectory.messages.append({"role": "assistant", "content": text})
            call = _CALL.search(text)
            # The last turn's call is not answered: nobody would read it.
            if call is None or sampled.finish_reason != "stop" or turn == self.config.max_turns - 1:
                break
            output = f"<result>{self._answer(call[1])}</result>"
            tokens = self.tokenizer.encode(output, add_special_tokens=False)
            if len(trajectory.tokens) + len(tokens) >= self.config.max_token_length:
                break
            trajectory.give(tokens)
            trajectory.messages.append({"role": "tool", "content": output})
        return trajectory

    async def score(self, item: Problem, trajectories: Sequence[Trajectory]) -> Sequence[float]:
        return [float(final_answer(trajectory) == item.answer) for trajectory in trajectories]

    def metrics(self) -> dict[str, float]:
        """Return the number of calls of the calculator, and of those that it could not answer."""
        values = {"calculator/calls": float(self._calls), "calculator/failed_calls": float(self._failed_calls)}
        if self._rollouts:
            values["calculator/calls_per_rollout"] = self._calls / self._rollouts
        self._calls, self._failed_calls, self._rollouts = 0, 0, 0
        return values

    def _answer(self, expression: str) -> str:
        self._calls += 1
        try:
            return calculate(expression)
        except DataError as error:
            self._failed_calls += 1
            return f"error: {error.message}"


def final_answer(trajectory: Trajectory) -> str | None:
    """Return the first final answer that the model itself gave; tool output does not count."""
    for message in trajectory.messages:
        if message["role"] == "assistant" and (found := _first_answer(message["content"])) is not None:
            return found.replace(",", "")
    return None


def _first_answer(text: str) -> str | None:
    """Return the content of the first ``<answer>`` that has no other tag inside."""
    for part in text.split("<answer>")[1:]:
        answer, _, rest = part.partition("<")
        if rest.startswith(_ANSWER_END.removeprefix("<")):
            return answer.strip()
    return None


def problem_of(number: int) -> Problem:
    """Return a problem for every number, the same each time: two or three operations on whole numbers."""
    source = random.Random(number)
    expression = str(source.randint(2, 99))
    for _ in range(source.randint(2, 3)):
        sign, operand = source.choice("+-*"), source.randint(2, 99)
        expression = f"({expression}) {sign} {operand}" if sign == "*" and " " in expression else (
            f"{expression} {sign} {operand}"
        )  # fmt: skip
    return Problem(f"What is {expression}?", calculate(expression))


def _numbers(count: int | None, *, seed: int) -> Iterator[int]:
    """Numbers of problems without end: of the first ``count``, or of very many."""
    source = random.Random(seed)
    while True:
        yield source.randrange(count or 1_000_000)


def calculate(expression: str) -> str:
    """Return the value of an expression of numbers, ``+ - * / // % **`` and parentheses; whole numbers without a point.

    Raises:
        DataError: it is not an expression, it is longer than 200 characters, or an intermediate value is not real or
            above 1e15; the message is short enough to be shown to a model.
    """
    if len(expression) > _LONGEST_EXPRESSION:
        raise DataError(f"longer than {_LONGEST_EXPRESSION} characters")
    try:
        value = _value(ast.parse(expression.strip().replace(",", ""), mode="eval").body)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise DataError("not an arithmetic expression") from error
    except ZeroDivisionError as error:
        raise DataError("division by zero") from error
    except OverflowError as error:
        raise DataError("number too large") from error
    rounded = round(value, 10)
    return str(int(rounded)) if rounded == int(rounded) else repr(rounded)


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _checked(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _OPERATORS:
            a, b = _value(left), _value(right)
            if isinstance(kind, ast.Pow) and abs(b) > _LARGEST_EXPONENT:
                raise DataError(f"exponent above {_LARGEST_EXPONENT}")
            return _checked(_OPERATORS[type(kind)](a, b))
    raise DataError("only numbers, + - * / // % ** and parentheses")


def _checked(value: float) -> float:
    if isinstance(value, complex) or not math.isfinite(value) or abs(value) > _LARGEST_NUMBER:
        raise DataError("number too large" if not isinstance(value, complex) else "not a real number")
    return value
