"""Sums over whole numbers, as bash computes them."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping


def computed(text: str) -> int | None:
    """Return the value of a sum with + - * / % and parentheses; None for anything else, or a division by zero."""
    if not re.fullmatch(r"[\d\s+\-*/%()]+", text) or "**" in text or len(text) > 200:
        return None
    try:
        plain = re.sub(r"\b0(?=\d)", "0o", re.sub(r"\s", "", text))  # a leading zero means base 8
        return _value(ast.parse(plain, mode="eval").body)
    except (ValueError, ZeroDivisionError, SyntaxError):
        return None


def _quotient(left: int, right: int) -> int:
    return int(left / right)  # towards zero, as in C


_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.Mod: lambda left, right: left - right * _quotient(left, right),
}


def _value(sum_: ast.expr) -> int:
    """Return a sum of whole numbers as bash computes it. Raises ValueError for anything else."""
    match sum_:
        case ast.BinOp(left, sign, right) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_value(left), _value(right))
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand)
        case ast.Constant(int(number)):
            return number
        case _:
            raise ValueError(ast.unparse(sum_))
