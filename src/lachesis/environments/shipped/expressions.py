"""Arithmetic in text, evaluated: no names, no calls, no numbers that take long. Pure."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

from lachesis.common.errors import DataError

_LENGTH = 200
_LARGEST = 1e15
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


def calculate(expression: str) -> str:
    """The value of an expression of numbers, ``+ - * / // % **`` and parentheses; whole numbers without a point.

    Raises:
        DataError: it is none, it is longer than 200 characters, or a number on the way is no real number or above
            1e15; the message is short enough to be shown to a model.
    """
    if len(expression) > _LENGTH:
        raise DataError(f"longer than {_LENGTH} characters")
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
    if isinstance(value, complex) or not math.isfinite(value) or abs(value) > _LARGEST:
        raise DataError("number too large" if not isinstance(value, complex) else "not a real number")
    return value
