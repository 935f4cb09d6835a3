"""The search of the documentation's site: what a user asks leads first to a page that answers it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote, urlsplit

import pytest

from tests.browser.test_dashboard import browser  # noqa: F401  # the one that reaches this machine
from tests.browser.test_report import Page
from tests.e2e.test_site import build
from tests.paths import ROOT
from tests.waiting import until

QUESTIONS = {
    "out of memory": "troubleshooting.html",
    "how much memory 14B": "gpu-guide.html",
    "own reward": "tutorials/own-reward.html",
    "reward is 0": "tutorials/own-reward.html",
    "run does not learn": "tutorials/does-not-learn.html",
    "stale weights": "troubleshooting.html",
    "two GPUs": "tutorials/two-gpus.html",
    "axolotl vllm section": "tutorials/from-axolotl.html",
    "wandb": "watching.html",
    "live page ssh": "watching.html",
    "push to hub": "tutorials/after-the-run.html",
    "export adapter": "tutorials/after-the-run.html",
    "resume after crash": "tutorials/after-the-run.html",
}
_FIRST = "document.querySelector('.md-search-result__list > li a')"


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing of requests."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the site, built as `make site` does and served from this machine."""
    out = tmp_path_factory.mktemp("site")
    done = build(ROOT, out)
    assert done.returncode == 0, done.stdout + done.stderr
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(out)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def first_hit(browser: Page, site: str, question: str) -> str:  # noqa: F811
    """The page that stands first in what the site's own search finds."""
    browser.driver.get(f"{site}index.html?q={quote(question)}")
    until(lambda: browser.ask(f"{_FIRST} !== null"))
    return urlsplit(browser.ask(f"{_FIRST}.href")).path.removeprefix("/")


def test_what_a_user_asks_leads_to_the_page_that_answers_it(browser: Page, site: str):  # noqa: F811
    browser.complaints(), browser.requests()
    assert {question: first_hit(browser, site, question) for question in QUESTIONS} == QUESTIONS
    assert {f"{urlsplit(url).scheme}://{urlsplit(url).netloc}/" for url in browser.requests()} <= {site}
