"""The documentation's site as it is published: its search, and its versions."""

from __future__ import annotations

import functools
import runpy
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote, urlsplit

import pytest

import lachesis
from tests.browser.local import browser  # noqa: F401  # the one that reaches this machine
from tests.browser.test_report import Page
from tests.paths import ROOT
from tests.waiting import until

QUESTIONS = {
    "out of memory": "troubleshooting.html",
    "how much memory 14B": "gpu-guide.html",
    "own reward": "tutorials/own-reward.html",
    "reward is 0": "tutorials/own-reward.html",
    "run does not learn": "tutorials/does-not-learn.html",
    "stale weights": "errors/exit-code-7.html",
    "two GPUs": "tutorials/two-gpus.html",
    "axolotl vllm section": "tutorials/from-axolotl.html",
    "wandb": "watching.html",
    "live page ssh": "watching.html",
    "push to hub": "tutorials/after-the-run.html",
    "export adapter": "tutorials/after-the-run.html",
    "resume after crash": "tutorials/after-the-run.html",
}
OLDER = "0.0.9"
_FIRST = "document.querySelector('.md-search-result__list > li a')"


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing of requests."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of two versions of the site, the older of which is a copy, served from this machine."""
    out = tmp_path_factory.mktemp("site")
    program = ROOT / "docs" / "publish.py"
    done = subprocess.run([sys.executable, str(program), str(out)], cwd=out, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.copytree(out / lachesis.__version__, out / OLDER)
    runpy.run_path(str(program))["list_versions"](out)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(out)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def first_hit(browser: Page, site: str, question: str) -> str:  # noqa: F811
    """The page that stands first in what the site's own search finds."""
    browser.driver.get(f"{site}{lachesis.__version__}/index.html?q={quote(question)}")
    until(lambda: browser.ask(f"{_FIRST} !== null"))
    return urlsplit(browser.ask(f"{_FIRST}.href")).path.removeprefix(f"/{lachesis.__version__}/")


def test_what_a_user_asks_leads_to_the_page_that_answers_it(browser: Page, site: str):  # noqa: F811
    browser.complaints(), browser.requests()
    assert {question: first_hit(browser, site, question) for question in QUESTIONS} == QUESTIONS
    assert {f"{urlsplit(url).scheme}://{urlsplit(url).netloc}/" for url in browser.requests()} <= {site}


def test_the_newest_version_comes_first_and_the_others_are_in_its_menu(browser: Page, site: str):  # noqa: F811
    browser.driver.get(site)
    until(lambda: browser.ask("location.pathname") == f"/{lachesis.__version__}/index.html")
    links = "[...document.querySelectorAll('.md-version__link')].map((link) => link.textContent.trim())"
    until(lambda: browser.ask(links) == [lachesis.__version__, OLDER])
    browser.driver.execute_script("document.querySelectorAll('.md-version__link')[1].click()")
    until(lambda: browser.ask("location.pathname").startswith(f"/{OLDER}/"))
