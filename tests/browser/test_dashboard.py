"""The dashboard of the rollout API in a real browser, before a real server that a trainer and environments use."""

from __future__ import annotations

import math
import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from tests.browser.test_report import CHROMIUM, FLAGS, INSTALL, Page
from tests.unit.plugins.atropos.api.processes import Server, ours

WORDS = ["7", "+", "5", "=", "12", "13", " ", "\n", "<end>", "</script><img src=x onerror=window.owned=1>"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """Chromium that reaches this machine only."""
    binary = next((path for name in CHROMIUM if (path := shutil.which(name))), None)
    chromedriver = shutil.which("chromedriver")
    if binary is None or chromedriver is None:
        missing = "Chromium" if binary is None else "chromedriver"
        pytest.fail(f"{missing} is not installed and the dashboard cannot be looked at: {INSTALL}", pytrace=False)
    try:
        from selenium import webdriver
    except ImportError:
        pytest.fail(f"selenium is not installed and the dashboard cannot be looked at: {INSTALL}", pytrace=False)
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    flags = [flag for flag in FLAGS if not flag.startswith("--host-resolver-rules")]
    local = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
    for flag in (*flags, local, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(executable_path=chromedriver, env={**os.environ, "SE_OFFLINE": "true"})
    driver = webdriver.Chrome(options=options, service=service)
    driver.get("about:blank")  # what the browser's own start page asks for is over
    yield Page(driver)
    driver.quit()


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A strict server with a limit and a tokenizer, in the middle of a run."""
    cwd = tmp_path_factory.mktemp("api")
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="7"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(cwd / "tokenizer.json"))
    with ours(cwd, strict=True, max_queued_tokens=2000, tokenizer="tokenizer.json") as server:
        yield server


@pytest.fixture
def run(api: Server) -> Server:
    """Two environments, 24 and 8 sequences queued, one batch delivered, one group set aside."""
    api.http.get("/reset_data")
    api.start(batch_size=16, wandb_project="arithmetic", wandb_group="run 7", num_steps=200)
    first = api.register_env(desired_name="gsm8k", group_size=8)
    second = api.register_env(desired_name="calculator", group_size=8, weight=3.0, min_batch_allocation=0.25)
    for number in range(6):
        api.post("/scored_data", rollout(number, env_id=second if number % 3 == 2 else first))
    assert len(api.get("/batch")["batch"]) == 2
    api.post("/scored_data", rollout(9, env_id=second) | {"scores": [1.0]})
    return api


def rollout(seed: int, *, env_id: int) -> dict[str, Any]:
    """Eight answers to 7+5, right or wrong, the first of them the best and with a hostile token at its end."""
    chance = random.Random(seed)
    prompt, answers = [0, 1, 2, 3], [[4, 6, 7, 8, 9], *([5, 8] for _ in range(7))]
    return {
        "tokens": [prompt + answer for answer in answers],
        "masks": [[-100] * 4 + answer for answer in answers],
        "scores": [1.0] + [0.0] * 7,
        "inference_logprobs": [
            [1.0] * 4 + [math.log(chance.choice([0.95, 0.6, 0.2, 0.005])) for _ in answer] for answer in answers
        ],
        "env_id": env_id,
    }


def look(browser: Page, api: Server, *, width: int = 1280, dark: bool = False) -> Page:
    """Open the dashboard and wait for its first figures."""
    browser.complaints(), browser.requests()
    browser.viewport(width=width, height=1000, dark=dark)
    browser.driver.get(f"http://127.0.0.1:{api.port}/dashboard")
    wait_until(lambda: browser.text("#pulse-text") == "live")
    return browser


def wait_until(condition: Any, *, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)
    assert condition()


def test_run_and_state(browser: Page, run: Server) -> None:
    page = look(browser, run)
    assert page.text("h1") == "arithmetic" and "batches of 16 sequences" in page.text("#words")
    assert page.text("#step") == "1" and page.text("#steps") == " / 200"
    assert page.text("#state-text") == "A batch is ready for the trainer."
    assert page.driver.title == "step 1 · rollouts · Lachesis"
    assert page.complaints() == []


def test_queue_is_shown_by_environment(browser: Page, run: Server) -> None:
    page = look(browser, run)
    assert page.text("#queue-words").startswith("32 sequences in 4 groups")
    widths = page.ask("[...document.querySelectorAll('#track i')].map((part) => part.getBoundingClientRect().width)")
    assert len(widths) == 2 and widths[0] == pytest.approx(3 * widths[1], rel=0.05)
    assert page.ask("[...document.querySelectorAll('#ruler span')].map((mark) => mark.textContent)") == [
        "0",
        "1 batch",
        "2",
    ]
    assert page.ask("document.querySelector('#meter').max") == 2000
    assert "of 2000" in page.text("#limit-words")


def test_environments_and_what_was_set_aside(browser: Page, run: Server) -> None:
    page = look(browser, run)
    rows = page.ask(
        "[...document.querySelectorAll('#rows tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    assert [row[0] for row in rows] == ["gsm8k_0", "calculator_0"]
    assert rows[0][1:5] == ["25 %", "–", "8", "24"] and rows[1][1:5] == ["75 %", "25 %", "8", "8"]
    assert rows[1][6] == "2 (1 set aside)"
    assert "calculator_0" in page.text("#misfits") and "scores has 1 entry, tokens has 8" in page.text("#misfits")


def test_latest_rollout_is_text_coloured_by_probability(browser: Page, run: Server) -> None:
    page = look(browser, run)
    assert page.text("#latest-words").startswith("calculator_0 · 8 sequences · 9 tokens, 5 trained on")
    tokens = page.ask(
        "[...document.querySelectorAll('#tokens .t')].map((token) =>"
        " [token.textContent, token.className, getComputedStyle(token).backgroundColor])"
    )
    assert [text for text, _, _ in tokens][:5] == ["7", "+", "5", "=", "12"]
    assert all("given" in name for _, name, _ in tokens[:4]) and not any("given" in name for _, name, _ in tokens[4:])
    assert tokens[6][0] == "⏎\n" and tokens[7][0] == "<end>"
    # Text of a model stays text.
    assert WORDS[9] in page.text("#tokens") and page.ask("window.owned === undefined")
    logprobs = rollout(5, env_id=1)["inference_logprobs"][0][4:]
    levels = {0.95: "p0", 0.6: "p2", 0.2: "p4", 0.005: "p7"}
    assert [name.split()[1] for _, name, _ in tokens[4:]] == [levels[round(math.exp(lp), 3)] for lp in logprobs]
    assert len({colour for _, _, colour in tokens[4:]}) == len(set(logprobs))
    page.hover("#tokens .t:nth-of-type(5)")
    assert page.ask("document.querySelector('#tip').hidden") is False
    assert "12" in page.text("#tip") and f"{abs(logprobs[0]):.3f}" in page.text("#tip")
    page.driver.execute_script("document.querySelectorAll('#tabs button')[3].click()")
    assert page.text("#tokens").endswith("13<end>") and page.text("#tabs [aria-pressed=true]") == "score 0"


def test_it_follows_the_run(browser: Page, run: Server) -> None:
    page = look(browser, run)
    assert page.text("#tokens").count("12") == 1
    run.get("/batch")
    owed = "The trainer waits: environment calculator_0 owes 4 sequences and has none queued."
    wait_until(lambda: page.text("#state-text") == owed)
    assert page.text("#step") == "2"
    page.driver.execute_script("document.querySelector('#hold').click()")
    held = page.text("#tokens")
    other = rollout(1, env_id=0)
    other["tokens"] = [[0, 0, 0, *row[3:]] for row in other["tokens"]]
    run.post("/scored_data", other)
    wait_until(lambda: page.text("#queue-words").startswith("24 sequences"))
    assert page.text("#tokens") == held
    page.driver.execute_script("document.querySelector('#hold').click()")
    wait_until(lambda: page.text("#tokens").startswith("777"))
    run.http.get("/reset_data")
    wait_until(lambda: page.text("#state-text") == "No trainer has registered.")
    assert page.ask("document.querySelector('#rollout').hidden") is True
    assert page.ask("document.querySelectorAll('#rows tr').length") == 0
    assert page.complaints() == []


def test_a_full_queue_and_a_lost_server_are_said(browser: Page, run: Server, tmp_path: Path) -> None:
    with ours(tmp_path, max_queued_tokens=100) as small:
        small.start(batch_size=64)
        small.post("/scored_data", rollout(1, env_id=0))
        small.http.post("/scored_data", json=rollout(1, env_id=0))
        page = look(browser, small)
        assert "waits: 8 of 64 sequences" in page.text("#state-text") and "1 post refused" in page.text("#limit-words")
        small.kill()
        wait_until(lambda: page.text("#pulse-text").startswith("no answer"))
    assert page.complaints(), "a refused connection is on the console"
    # Ask for nothing more from a server that has gone.
    page.driver.get("about:blank")


def test_nothing_is_asked_of_anyone_else(browser: Page, run: Server) -> None:
    page = look(browser, run)
    page.hover("[data-chart=groups_per_s] svg")
    asked = page.requests()
    assert asked and all(url.startswith(f"http://127.0.0.1:{run.port}/dashboard") for url in asked)


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False)])
def test_fits_the_screen_in_both_schemes(browser: Page, run: Server, width: int, dark: bool) -> None:
    page = look(browser, run, width=width, dark=dark)
    assert page.ask("document.documentElement.scrollWidth") <= width
    ink, paper = page.ask("[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]")
    brightness = [sum(int(part) for part in colour.strip("rgb()").split(",")) for colour in (ink, paper)]
    assert (brightness[0] > brightness[1]) is dark
