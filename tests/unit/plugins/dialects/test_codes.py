"""What `lachesis explain` says of exit codes and health rules, and where it sends who wants to know more."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from lachesis.cli import base
from lachesis.common import errors
from lachesis.metrics.health.monitor import RULES
from lachesis.plugins.cluster.layout import FINAL
from lachesis.plugins.dialects.commands.keys import exit_codes, meaning
from tests.paths import DOCS


def test_each_exit_code_has_a_page_and_is_in_the_list_of_them():
    listed = re.findall(
        r"^\| \[(\d+)\]\(errors/exit-code-(\d+)\.md\) \| ([^|]+) \|", (DOCS / "errors.md").read_text(), re.M
    )
    assert [int(code) for code, *_ in listed] == [int(page) for _, page, _ in listed] == list(exit_codes())
    assert len([*(DOCS / "errors").iterdir()]) == len(listed)
    for code, _, title in listed:
        page = (DOCS / "errors" / f"exit-code-{code}.md").read_text()
        assert page.startswith(f"# Exit code {code}: {title}\n") and "\n## What to do\n" in page
        for name in re.findall(r"\b[A-Z]\w+(?=: )", exit_codes()[int(code)]):
            assert not hasattr(errors, name) or f"`{name}`" in page


def test_jobs_are_said_to_stay_ended_with_the_codes_that_they_do():
    said = re.search(r"do not restart after codes ([\d, and]+), because", (DOCS / "errors.md").read_text())
    assert said is not None and [int(code) for code in re.findall(r"\d+", said[1])] == FINAL


def test_each_error_class_is_told_with_its_code():
    assert exit_codes()[errors.StaleWeights.exit_code].startswith("StaleWeights: Engine weights")
    assert {70, 130, 143, 0, 1} < exit_codes().keys()
    assert [*meaning("6")][-1].endswith("docs/errors/exit-code-6.md")
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
