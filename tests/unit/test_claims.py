"""What README and the pages promise without exception is shown by a test, and what they measured is in the results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.paths import BENCHMARKS, DOCS, ROOT

# Generated pages, and those of which each row names its tests or is a change that a test applies.
ELSEWHERE = {"configuration.md", "migration.md", "defects.md", "extending.md"}
PAGES = [ROOT / "README.md", *(page for page in sorted(DOCS.rglob("*.md")) if page.name not in ELSEWHERE)]
ABSOLUTE = re.compile(r"\b(never|always)\b", re.IGNORECASE)

# A part of each sentence with such a word, and the test of it; no test where the sentence is not about us.
SHOWN = {
    "the step never goes back": "unit/api/test_state.py::test_a_registration_takes_no_step_back",
    "The code's process never has the test": "contracts/test_code_attacks.py::test_no_attack_passes_any_test",
    "its `env_id` was never registered": "unit/api/test_state.py::test_strict_sets_aside_and_counts",
    "a post that could never fit gets 413": "unit/api/test_state.py::test_full_queue_refuses_whole_posts",
    "an earlier trainer never acknowledged": "unit/rollouts/atropos/test_source.py::"
    "test_a_trainer_that_dies_before_its_step_leaves_the_batch_to_the_next",
    "Buffered sizes that never add up to": "",
    "| never delivered |": "",
    "(clients never disconnect)": "",
    "It ended, or it never started": "",
}

# What a page says, and where the results have it.
MEASURED = [
    ("README.md", "0.58 s; TRL 1.16 takes 1.55 s", ["0.584 ± 0.007", "1.550 ± 0.004"]),
    ("README.md", "0.32 s; TRL takes 1.05 s", ["1.049 (0.970 to 1.542) | 0.324"]),
    ("README.md", "6 ms after the optimizer step", ["6.3 (7.3)"]),
    ("README.md", "a LoRA adapter 36 to 73 ms", ["36 (40)", "73 (112)"]),
    *(
        (page, words, rows)
        for page in ("docs/engines.md", "docs/quickstart-by-mode.md")
        for words, rows in (
            ("6 ms", ["6.3 (7.3)"]),
            ("73 ms", ["73 (112)"]),
            ("36 ms", ["36 (40)"]),
            ("0.20 s", ["202 (214)"]),
            ("0.33 s", ["332 (334)"]),
            ("72 s", ["71,537"]),
            ("59 s", ["59,161"]),
            ("+0.8 GB", ["72.1, 72.9 GB", "56.9, 57.7 GB"]),
        )
    ),
    ("docs/losses.md", "1.38 s in place of 1.67 s", ["1.379 ± 0.003", "1.671 ± 0.004"]),
]


def sentences(page: Path) -> list[str]:
    """Lines with such a word, outside of code."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return [line for line in text.splitlines() if ABSOLUTE.search(line)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_said_without_exception_has_a_test(page: Path):
    unknown = [line for line in sentences(page) if not any(part in line for part in SHOWN)]
    assert not unknown, "say it less absolutely, or name the test that shows it"


@pytest.mark.parametrize(("part", "test"), SHOWN.items())
def test_those_tests_are_there_and_the_sentences_too(part: str, test: str):
    assert any(part in page.read_text() for page in PAGES), "nobody says so any more"
    path, _, name = test.partition("::")
    if test:
        assert name in (ROOT / "tests" / path).read_text()


@pytest.mark.parametrize(("page", "words", "rows"), MEASURED)
def test_what_was_measured_is_in_the_results(page: str, words: str, rows: list[str]):
    assert words in (ROOT / page).read_text(), "nobody says so any more"
    results = (BENCHMARKS / "RESULTS.md").read_text()
    assert [row for row in rows if row not in results] == []
