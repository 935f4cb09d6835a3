"""The report in a real browser: Chromium without a network, driven by selenium, which downloads nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import until

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
INSTALL = "install it with `apt-get install -y chromium chromium-driver` and `pip install selenium==4.51.0`"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--window-size=1280,1000",
)
# Where an element is once two frames agree: Chromium goes on scrolling for a frame or two when content
# above has changed its height, and a mouse that moves in between meets the neighbour.
WHERE_IT_RESTS = """
const [selector, done] = arguments;
const place = () => document.querySelector(selector).getBoundingClientRect().toJSON();
const settle = (before) => requestAnimationFrame(() => setTimeout(() => {
  const now = place();
  if (now.x === before.x && now.y === before.y) done(now); else settle(now);
}));
settle(place());
"""


class Page:
    """A page in the browser, with the few gestures of these tests."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path, fragment: str = "") -> None:
        self.driver.get("about:blank")
        self.driver.get(path.as_uri() + fragment)

    def ask(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        return self.driver.execute_script(f"return {script};")

    def hover(self, selector: str, *, x: float = 0.5, y: float = 0.5) -> None:
        """Move the real mouse over an element, to a place given in shares of its size."""
        self.driver.execute_script(
            "document.querySelector(arguments[0]).scrollIntoView({block: 'center', behavior: 'instant'})", selector
        )
        box = self.driver.execute_async_script(WHERE_IT_RESTS, selector)
        where = {"x": box["x"] + x * box["width"], "y": box["y"] + y * box["height"]}
        self.driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", **where})

    def text(self, selector: str) -> str:
        return self.ask(f"document.querySelector({json.dumps(selector)}).textContent")

    def complaints(self) -> list[str]:
        """What the console has said since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Addresses asked for since the last call, files and data aside."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        urls = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return [url for url in urls if not url.startswith(("file:", "data:", "about:"))]

    def viewport(self, *, width: int, height: int, dark: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    binary = next((path for name in CHROMIUM if (path := shutil.which(name))), None)
    chromedriver = shutil.which("chromedriver")
    if binary is None or chromedriver is None:
        missing = "Chromium" if binary is None else "chromedriver"
        pytest.fail(f"{missing} is not installed and the report cannot be looked at: {INSTALL}", pytrace=False)
    try:
        from selenium import webdriver
    except ImportError:
        pytest.fail(f"selenium is not installed and the report cannot be looked at: {INSTALL}", pytrace=False)
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # A driver given by path keeps selenium from looking for one, and from looking anything up at all.
    service = webdriver.ChromeService(executable_path=chromedriver, env={**os.environ, "SE_OFFLINE": "true"})
    driver = webdriver.Chrome(options=options, service=service)
    driver.get("about:blank")  # what the browser's own start page asks for is over
    yield Page(driver)
    driver.quit()


@pytest.fixture(scope="session")
def report(make_run: Callable[[int], Path]) -> Path:
    return make_run(80) / "report.html"


@pytest.fixture
def page(browser: Page, report: Path) -> Iterator[Page]:
    """The report, freshly opened; afterwards it must have complained of nothing and asked for nothing."""
    browser.complaints(), browser.requests()
    browser.viewport(width=1280, height=1000)
    browser.open(report)
    yield browser
    assert browser.complaints() == []
    assert browser.requests() == []


def test_header_tells_the_result(page: Page) -> None:
    assert page.text("h1") == "quickstart"
    shown = page.ask("document.querySelector('#result').getAttribute('aria-label')")
    assert shown.startswith("held-out accuracy 0.3") and "512 problems, 80 steps" in shown
    assert page.text(".figure strong").endswith("%")


def test_every_chart_is_a_line_through_its_points(page: Page) -> None:
    expected = page.ask(
        "report.charts.filter((chart) => !chart.flat)"
        ".map((chart) => [chart.id, chart.series.map((series) => series.x.length)])"
    )
    assert {"reward", "evaluation/accuracy", "mean_kl", "mean_ratio", "clipped_fraction", "entropy"} <= {
        name for name, _ in expected
    }
    for name, lengths in expected:
        paths = page.ask(
            f"[...document.querySelectorAll('[data-chart=\"{name}\"] path.line:not(.raw)')]"
            ".map((path) => path.getAttribute('d').match(/[ML]/g).length)"
        )
        assert paths == lengths, name


@pytest.mark.parametrize("width", [1280, 390])
def test_no_label_of_an_axis_is_cut_off(page: Page, report: Path, width: int) -> None:
    page.viewport(width=width, height=900)
    page.open(report)
    outside = (
        "[...document.querySelectorAll('[data-chart] svg text, #timing-chart svg text')].filter((text) => {"
        " const of = text.getBoundingClientRect(), all = text.closest('svg').getBoundingClientRect();"
        " return of.width && (of.left < all.left || of.right > all.right || of.bottom > all.bottom); })"
        ".map((text) => [text.closest('[data-chart]')?.dataset.chart, text.textContent])"
    )
    labels = page.ask("[...document.querySelectorAll('[data-chart=\"reward_metrics/letters\"] text')].length")
    assert labels > 3
    assert page.ask(outside) == []


def test_each_rank_and_environment_has_a_line_that_looks_like_no_other(page: Page) -> None:
    for chart, names in (
        ("train_time/0", [f"rank {rank}" for rank in range(7)]),
        ("reward_of_environment/code_0", ["code_0", "gsm8k_0"]),
    ):
        card = f"document.querySelector('[data-chart=\"{chart}\"]')"
        assert page.ask(
            f"[...{card}.querySelectorAll('.series span')].map((one) => one.firstChild.nextSibling.data)"
        ) == [f"{name} " for name in names]
        looks = page.ask(
            f"[...{card}.querySelectorAll('path.line:not(.raw)')].map((line) => getComputedStyle(line))"
            ".map((style) => style.stroke + style.strokeDasharray)"
        )
        assert len(set(looks)) == len(names)


def test_a_finding_leads_to_what_to_change_and_to_what_it_means(page: Page) -> None:
    for place, told in (
        ("key-sampling.num_generations", "num_generations: 8"),
        ("about-zero_variance", "zero_variance"),
    ):
        page.driver.execute_script(f"document.querySelector('#health a[href=\"#{place}\"]').click()")
        assert page.ask(f"byId('{place}').closest('details').open")
        assert page.text(".pointed").strip() == told
        inside = (
            "(() => { const at = document.querySelector('.pointed').getBoundingClientRect();"
            " return at.top >= 0 && at.bottom <= innerHeight; })()"
        )
        until(lambda inside=inside: page.ask(inside), "the page did not go there")
        assert page.ask("location.hash") == "", "the live page's has its token"


def test_healthy_range_is_shaded_and_the_reward_has_its_band(page: Page) -> None:
    assert page.ask("document.querySelectorAll('[data-chart=mean_kl] rect.range').length") == 1
    assert page.ask("document.querySelectorAll('[data-chart=loss] rect.range').length") == 0
    band = page.ask("document.querySelector('[data-chart=reward] path.band').getAttribute('d').length")
    assert band > 500


def test_pointing_at_one_chart_reads_all_of_them(page: Page) -> None:
    before = page.text("[data-chart=entropy] .value")
    page.hover("[data-chart=reward] svg", x=0.3)
    step = int(page.text("[data-chart=reward] .flag text"))
    assert 10 < step < 40
    assert page.text("[data-chart=entropy] .flag text") == str(step)
    assert page.text("[data-chart=entropy] .value") != before
    value = page.ask(f"report.charts.find((chart) => chart.id === 'reward').series[0].y[{step - 1}]")
    assert float(page.text("[data-chart=reward] .value")) == pytest.approx(value, abs=5e-4)
    page.hover("h1")
    assert page.text("[data-chart=entropy] .value") == before
    assert page.ask("document.querySelector('[data-chart=reward] .crosshair').getAttribute('visibility')") == "hidden"


def test_smoothing_can_be_switched(page: Page) -> None:
    path = "document.querySelector('[data-chart=loss] path.line:not(.raw)').getAttribute('d')"
    smooth = page.ask(path)
    assert page.ask("document.querySelectorAll('[data-chart=loss] path.raw').length") == 1
    page.driver.execute_script("document.querySelector('#smooth').click()")
    assert page.ask(path) != smooth
    assert page.ask("document.querySelectorAll('[data-chart=loss] path.raw').length") == 0


def test_time_is_split_into_its_parts(page: Page) -> None:
    assert page.ask("document.querySelectorAll('#timing-chart path.part').length") == 5
    assert "Generation" in page.text("#timing-chart .parts")
    page.hover("#timing-chart svg")
    assert " ms" in page.text("#timing-chart .parts")


def test_slider_changes_the_rollouts(page: Page) -> None:
    last = page.text("#samples")
    assert page.text("#step-label") == "step 80"
    slide = "const slider = document.querySelector('#step'); slider.value = 0; slider.dispatchEvent(new Event('input'))"
    page.driver.execute_script(slide)
    assert page.text("#step-label") == "step 1"
    assert page.text("#samples") != last
    prompt = page.text("#prompt")
    page.driver.execute_script("document.querySelectorAll('#groups button')[1].click()")
    assert page.text("#prompt") != prompt
    page.driver.execute_script("document.querySelector('#next').click()")
    assert page.ask("Number(document.querySelector('#step').value)") == 1


def test_how_rewards_are_spread_stands_beside_the_rollouts(page: Page) -> None:
    counts = page.ask("report.rollouts.at(-1).rewards.counts")
    heights = page.ask("[...document.querySelectorAll('#spread rect')].map((bar) => bar.height.baseVal.value)")
    assert [height * max(counts) / 40 for height in heights] == pytest.approx(counts)
    assert f"rewards of {sum(counts)} completions" in page.text("#spread figcaption")
    page.driver.execute_script("page.showStep(1)")
    assert page.text("#spread figcaption").startswith(
        f"rewards of {sum(page.ask('report.rollouts[0].rewards.counts'))} "
    )


def test_clicking_a_chart_opens_its_rollouts(page: Page) -> None:
    page.hover("[data-chart=reward] svg", x=0.5)
    step = int(page.text("[data-chart=reward] .flag text"))
    page.driver.find_element("css selector", "[data-chart=reward] svg").click()
    assert abs(int(page.text("#step-label").removeprefix("step ")) - step) <= 2


def test_tokens_are_coloured_by_their_probability(page: Page) -> None:
    page.driver.execute_script("page.showStep(1)")
    colours = page.ask(
        "[...document.querySelectorAll('#samples .t')].map((token) => getComputedStyle(token).backgroundColor)"
    )
    assert len(set(colours)) >= 4
    unlikely = page.ask(
        "[...document.querySelectorAll('#samples .p6, #samples .p7')].every((token) => {"
        " const card = [...document.querySelectorAll('.sample')].indexOf(token.closest('.sample'));"
        " const shown = report.rollouts[0].groups[0].samples[card];"
        " return shown.logprobs[token.dataset.i] < Math.log(0.03); })"
    )
    assert unlikely
    page.hover("#samples .t")
    assert page.ask("document.querySelector('#tip').hidden") is False
    assert "logprob" in page.text("#tip") and "probability" in page.text("#tip")
    logprob = page.ask("report.rollouts[0].groups[0].samples[0].logprobs[0]")
    assert f"{abs(logprob):.3f}" in page.text("#tip")


def test_text_of_the_model_stays_text(browser: Page, tmp_path: Path, make_run: Callable[[int], Path]) -> None:
    run = make_run(3)
    tape = run / "rollouts" / "step_000003.jsonl"
    lines = [json.loads(line) for line in tape.read_text().splitlines()]
    hostile = "</script><img src=http://example.invalid/x onerror=window.owned=1>\u2028\n\t"
    lines[0]["prompt"]["text"] = hostile
    lines[0]["samples"][0] |= {"pieces": [hostile], "logprobs": [-1.0], "completion_ids": [1], "reward": 9.0}
    tape.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "config.yaml").write_text(f"run:\n  name: {json.dumps(hostile[:40])}\n")
    from lachesis.plugins.report.page import write_report

    browser.complaints(), browser.requests()
    browser.open(write_report(run))
    assert browser.ask("window.owned === undefined && document.querySelectorAll('main img').length === 0")
    assert hostile[:20] in browser.text("#prompt") and hostile[:20] in browser.text("#samples")
    assert "⏎" in browser.text("#prompt") and "⇥" in browser.text("#prompt")
    assert browser.text("h1") == hostile[:40]
    assert (browser.complaints(), browser.requests()) == ([], [])


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False)])
def test_fits_the_screen_in_both_schemes(page: Page, report: Path, width: int, dark: bool) -> None:
    page.viewport(width=width, height=900, dark=dark)
    page.open(report)
    assert page.ask("document.documentElement.scrollWidth") <= width
    ink, paper = page.ask("[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]")
    brightness = [sum(int(part) for part in colour.strip("rgb()").split(",")) for colour in (ink, paper)]
    assert (brightness[0] > brightness[1]) is dark
    overflowing = page.ask(
        "[...document.querySelectorAll('.chart, .series, .sample')]"
        ".filter((part) => part.scrollWidth > part.clientWidth + 1).map((part) => part.textContent)"
    )
    assert overflowing == []


def test_advantages_are_whole_in_a_wide_font_too(page: Page) -> None:
    page.driver.execute_script("document.body.style.letterSpacing = '4px'")
    cut = (
        "[...document.querySelectorAll('.sample header b')].filter((value) => value.getBoundingClientRect().right"
        " > value.closest('.sample').getBoundingClientRect().right - 2).map((value) => value.textContent)"
    )
    assert page.ask("document.querySelectorAll('.sample header b').length") > 4
    assert page.ask(cut) == []


def test_theme_button_overrides_the_system(page: Page) -> None:
    before = page.ask("getComputedStyle(document.body).backgroundColor")
    for _ in range(2):
        page.driver.execute_script("document.querySelector('#theme').click()")
    assert page.text("#theme") == "Theme: dark"
    assert page.ask("getComputedStyle(document.body).backgroundColor") != before
    page.driver.execute_script("document.querySelector('#theme').click()")
