"""The page of an environment's rollouts in a real browser: real questions, answered by a model, scored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lachesis.plugins.atropos.commands.environments import run_environment
from lachesis.web.pages import CONTROLS
from tests import gsm8k
from tests.browser.test_report import Page, browser  # noqa: F401
from tests.e2e.atropos_runs import stage

GROUPS, SIZE = 4, 8
# What stands below the summary of each group: the prompt, and for each sequence its heading and its tokens.
CARDS = """[...document.querySelectorAll('details')].map((card) => ({
    prompt: card.querySelector('.prompt').innerText,
    headings: [...card.querySelectorAll('h2')].map((heading) => heading.innerText),
    answers: [...card.querySelectorAll('pre:not(.prompt)')].map((answer) => answer.innerText),
    tokens: [...card.querySelectorAll('pre:not(.prompt)')].map((answer) =>
        [...answer.querySelectorAll('span')].map((token) => Number(token.title.split(':')[0]))),
}))"""


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A JSONL file of `lachesis env gsm8k process`, and the page beside it."""
    directory = tmp_path_factory.mktemp("rollouts")
    model = gsm8k.write_learned_model(directory / "model")
    path = directory / "rollouts.jsonl"
    with stage(directory, model=model, mode="shared_vllm", steps=1) as job:
        job.start_engine()
        words = ["--env.data", str(gsm8k.DATA), "--env.max_num", str(GROUPS), "--env.group_size", str(SIZE),
                 "--env.total_steps", str(GROUPS), "--env.max_new_tokens", "96", "--openai.base_url", job.engine_url,
                 "--env.data_path_to_save_groups", str(path)]  # fmt: skip
        assert run_environment("gsm8k", "process", words) == 0
    return path


@pytest.fixture
def page(browser: Page, rollouts: Path) -> Iterator[Page]:  # noqa: F811
    browser.complaints(), browser.requests()
    browser.viewport(width=1280, height=1000)
    browser.open(rollouts.with_suffix(".html"))
    yield browser
    assert (browser.complaints(), browser.requests()) == ([], [])


def written(rollouts: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in rollouts.read_text().splitlines()]


def open_all(page: Page) -> None:
    """Click on each group that is folded up."""
    for summary in page.driver.find_elements("css selector", "details:not([open]) > summary"):
        summary.click()


def as_shown(text: str) -> str:
    """Write out control characters, as the page does: a model may sample one anywhere."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    return CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", lines)


def without_special(text: str) -> str:
    """The page shows every token; a message leaves special ones out, which a model may sample anywhere."""
    for token in (gsm8k.PAD, gsm8k.START, gsm8k.END):
        text = text.replace(token, "")
    return text


def test_questions_answers_tokens_and_scores_are_to_be_read(page: Page, rollouts: Path) -> None:
    groups = written(rollouts)
    scores = [score for group in groups for score in group["scores"]]
    assert page.text("h1") == "gsm8k"
    assert page.text(".facts") == (
        f"{GROUPS} groups, {len(scores)} sequences, mean score {sum(scores) / len(scores):.3f}"
    )
    assert page.ask("document.querySelectorAll('details[open]').length") == 1, "the first, to begin with"
    open_all(page)
    cards = page.ask(CARDS)
    for card, group in zip(cards, groups, strict=True):
        question = group["messages"][0][-2]["content"]
        assert " ".join(question.split()) in " ".join(card["prompt"].split())
        for index, score in enumerate(group["scores"]):
            trained = [token for token, mask in zip(group["tokens"][index], group["masks"][index], strict=True)
                       if mask != -100]  # fmt: skip
            assert card["tokens"][index] == trained
            assert card["headings"][index].startswith(f"Score {score:g}")
            assert f"{len(trained)} tokens, ended by stop" in card["headings"][index]
            answer = group["messages"][index][-1]["content"]
            assert without_special(card["answers"][index]) == as_shown(answer)
    assert {heading.partition(" ")[2][0] for card in cards for heading in card["headings"]} == {"0", "1"}


def test_tokens_are_coloured_by_their_probability(page: Page, rollouts: Path) -> None:
    open_all(page)
    shown = page.ask(
        "[...document.querySelectorAll('details pre:not(.prompt) span')]"
        ".map((token) => [getComputedStyle(token).backgroundColor, token.title])"
    )
    transparent = {colour for colour, title in shown if "p = 1," in title}
    assert len(transparent) == 1 and len({colour for colour, _ in shown}) >= 3
    assert all("logprob" in title for _, title in shown)


@pytest.mark.parametrize(("width", "dark"), [(1280, True), (390, False)])
def test_it_fits_the_screen_in_both_schemes(page: Page, width: int, dark: bool) -> None:
    page.viewport(width=width, height=900, dark=dark)
    open_all(page)
    assert page.ask("document.documentElement.scrollWidth") <= width
    ink, paper = page.ask("[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]")
    brightness = [sum(int(part) for part in colour.strip("rgb()").split(",")) for colour in (ink, paper)]
    assert (brightness[0] > brightness[1]) is dark
