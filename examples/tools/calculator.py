"""The example's tool."""

from lachesis.environments.shipped.calculator import calculate as value_of


def calculate(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: Numbers with + - * / and parentheses, such as 12*7.
    """
    return value_of(expression)
