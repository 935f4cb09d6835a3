"""The example's tool."""

import re


def calculate(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: Numbers with + - * / and parentheses, such as 12*7.
    """
    if "**" in expression or not re.fullmatch(r"[\d\s.+*/()-]{1,60}", expression):
        raise ValueError("only numbers, + - * / and parentheses")
    return str(eval(expression))
