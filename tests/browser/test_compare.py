"""The page that `lachesis compare` writes, in a real browser without a network."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lachesis.metrics.sinks.jsonl import read_metrics
from lachesis.metrics.sinks.tape import read_lines, tape_files
from tests.browser.conftest import write_run
from tests.browser.test_report import Page, browser  # noqa: F401
from tests.e2e.runs import environment
from tests.waiting import LONG_S

STEPS = 40


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs of one configuration that differ in their seed alone."""
    directory = tmp_path_factory.mktemp("seeds")
    return [write_run(directory / f"seed_{seed}", steps=STEPS, seed=seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def written(seeds: list[Path]) -> Path:
    out = seeds[0].parent / "compare.html"
    words = [sys.executable, "-m", "lachesis", "compare", *map(str, seeds), "--out", str(out)]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=LONG_S)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture
def page(browser: Page, written: Path) -> Iterator[Page]:  # noqa: F811
    browser.complaints(), browser.requests()
    browser.viewport(width=1280, height=1000)
    browser.open(written)
    yield browser
    assert (browser.complaints(), browser.requests()) == ([], [])


def charted(page: Page, name: str) -> dict[str, Any]:
    """How many lines and bands the chart of a metric has, and how tall its band is on the screen."""
    chart = f"document.querySelector('[data-chart=\"{name}\"]')"
    return {
        "lines": page.ask(f"{chart}.querySelectorAll('path.line:not(.raw)').length"),
        "bands": page.ask(f"{chart}.querySelectorAll('path.band').length"),
        "height": page.ask(f"{chart}.querySelector('path.band').getBoundingClientRect().height"),
    }


def best_by_prompt(run_dir: Path) -> dict[str, str]:
    """By the text of a prompt the best completion of the last group that answered it."""
    found: dict[str, str] = {}
    for path in tape_files(run_dir / "rollouts").values():
        groups: dict[str, str] = {}
        for line in read_lines(path):
            best = max(line["samples"], key=lambda sample: sample["reward"])["text"]
            groups.setdefault(line["prompt"]["text"], best)
        found |= groups
    return found


def test_two_seeds_are_a_mean_with_the_deviation_as_a_band(page: Page, seeds: list[Path]) -> None:
    assert "differ only in their seed" in page.text(".hero")
    shown = charted(page, "reward")
    assert (shown["lines"], shown["bands"]) == (1, 1) and shown["height"] > 5
    first, second = ([line.values["reward"] for line in read_metrics(seed / "metrics.jsonl").steps] for seed in seeds)
    means = page.ask("report.charts.find((chart) => chart.id === 'reward').series[0].y")
    assert means == pytest.approx([(a + b) / 2 for a, b in zip(first, second, strict=True)], rel=1e-3)


def test_what_a_reward_function_logged_is_compared_too(page: Page) -> None:
    shown = charted(page, "reward_metrics/letters")
    assert (shown["lines"], shown["bands"]) == (1, 1) and shown["height"] > 5
    assert page.text("[data-chart='reward_metrics/letters'] h3") == "letters"


def test_the_same_prompt_stands_side_by_side(page: Page, seeds: list[Path]) -> None:
    answers = [best_by_prompt(seed) for seed in seeds]
    shown = page.ask(
        "[...document.querySelectorAll('#prompts .card')].map((card) => [card.querySelector('.prompt').textContent,"
        " [...card.querySelectorAll('.sample')].map((one) => [one.querySelector('b').textContent,"
        " one.querySelector('pre').textContent, one.getBoundingClientRect().left, one.getBoundingClientRect().top])])"
    )
    assert len(shown) == min(8, len(answers[0].keys() & answers[1].keys())) > 0
    for prompt, samples in shown:
        assert [name for name, *_ in samples] == ["seed_1", "seed_2"]
        assert [text for _, text, *_ in samples] == [one[prompt] for one in answers]
        (_, _, left, top), (_, _, right, also_top) = samples
        assert left < right and top == also_top, "side by side"
