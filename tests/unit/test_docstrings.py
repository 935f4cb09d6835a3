"""Docstrings name their subject: a check beyond ruff's D rules."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import lachesis

ROOT = Path(lachesis.__file__).parent
# Words that open a fragment, such as "Whether somebody has." or "Those that were generated."
FRAGMENTS = {"By", "How", "If", "Of", "That", "Their", "Them", "There", "They", "Those", "What", "When", "Where"}
FRAGMENTS |= {"Whether", "Which", "Who", "Whose", "Why", "With", "Within"}
# A function does something: it begins with no article, either.
NOT_OF_FUNCTIONS = FRAGMENTS | {
    "A",
    "After",
    "All",
    "An",
    "As",
    "Before",
    "For",
    "From",
    "In",
    "It",
    "The",
    "This",
    "To",
}
STATEMENTS = ("metrics/health/rules.py",)  # a rule's docstring states the finding
FILES = sorted(ROOT.rglob("*.py"))


def _docstrings(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node, text


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_docstring_opens_with_a_verb_or_a_noun(path: Path) -> None:
    for node, text in _docstrings(ast.parse(path.read_text())):
        acts = (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and str(path.relative_to(ROOT)) not in STATEMENTS
        )
        refused = NOT_OF_FUNCTIONS if acts else FRAGMENTS
        line = getattr(node, "lineno", 1)
        assert text.split()[0].strip(",:`") not in refused, f"{path}:{line}: {text.splitlines()[0]}"
