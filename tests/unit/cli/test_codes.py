"""What `lachesis explain` says of exit codes and health rules, and where it sends who wants to know more."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from lachesis.cli import base
from lachesis.cli.codes import exit_codes, meaning
from lachesis.common import errors
from lachesis.metrics.health.monitor import RULES
from tests.paths import DOCS


def test_each_exit_code_has_its_place_on_the_page_and_no_other_has():
    page = (DOCS / "errors.md").read_text()
    headings = [int(number) for number in re.findall(r"^## Exit code (\d+)$", page, re.MULTILINE)]
    assert headings == list(exit_codes())
    for code, words in exit_codes().items():
        for name in re.findall(r"\b[A-Z]\w+(?=: )", words):
            if hasattr(errors, name):
                section = page.partition(f"## Exit code {code}\n")[2].partition("\n## ")[0]
                assert f"`{name}`" in section


def test_each_error_class_is_told_with_its_code():
    assert exit_codes()[errors.StaleWeights.exit_code].startswith("StaleWeights: The engine's weights")
    assert {70, 130, 143, 0, 1} < exit_codes().keys()
    assert [*meaning("6")][-1].endswith("docs/errors.md#exit-code-6")
    assert [*meaning("99")] == [*meaning("learning_rate")] == []


@pytest.mark.parametrize("name", RULES)
def test_each_health_rule_is_told_with_its_anchor(name: str):
    first, said, where = meaning(name)
    assert first == f"{name}: a health rule" and len(said.split()) > 3 and where.endswith(f"docs/metrics.md#{name}")


@pytest.mark.parametrize("terminal", [True, False])
def test_an_error_on_a_terminal_says_where_its_code_is_told_of(terminal: bool, monkeypatch: pytest.MonkeyPatch):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, no_color=True, highlight=False, soft_wrap=True, width=200)
    monkeypatch.setattr(base, "error_console", console)
    with pytest.raises(SystemExit) as exit_:
        base.fail("what was wrong -> what to do", ValueError(), code=6)
    assert exit_.value.code == 6
    hint = "  (more: lachesis explain 6)" if terminal else ""
    assert re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()) == f"error: what was wrong -> what to do{hint}\n", "one line"
