"""The documentation as a site: every page is in it, no link leads nowhere, nothing is loaded from elsewhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

QUESTIONS = {
    "reward returns None": "data-and-rewards",
    "notebook": "python",
    "staleness": "metrics",
    "broadcast": "engines",
    "Axolotl": "migration",
    "not learn": "tutorials/does-not-learn",
    "two GPUs": "tutorials/two-gpus",
    "entry point": "custom",
}


def build(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = build(ROOT, out)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_every_page_is_in_it(site: Path):
    docs = ROOT / "docs"
    pages = {path.relative_to(docs).with_suffix("").as_posix() for path in docs.rglob("*.md")} | {"index"}
    assert pages <= {path.relative_to(site).with_suffix("").as_posix() for path in site.rglob("*.html")}
    front = (site / "index.html").read_text()
    assert all(f'href="{page}.html"' in front for page in pages)
    assert (site / "repository" / "examples" / "loop.py").read_text() == (ROOT / "examples" / "loop.py").read_text()


def test_it_loads_nothing_from_elsewhere(site: Path):
    source, style = (
        r'<(?:script|img|iframe)[^>]*\ssrc="(https?:[^"]+)',
        r'<link[^>]*stylesheet[^>]*href="(https?:[^"]+)',
    )
    for page in site.glob("*.html"):
        assert not re.findall(f"{source}|{style}", page.read_text()), page.name


@pytest.mark.parametrize(("words", "page"), QUESTIONS.items())
def test_the_search_knows_where(site: Path, words: str, page: str):
    """The index has the words of a question in a section of the page that answers it."""
    index = json.loads((site / "search" / "search_index.json").read_text())
    sections = [entry for entry in index["docs"] if entry["location"].startswith(f"{page}.html")]
    texts = [f"{entry['title']} {entry['text']}".lower() for entry in sections]
    assert any(all(word.lower() in text for word in words.split()) for text in texts)


def test_a_link_that_leads_nowhere_fails(tmp_path: Path):
    for name in ("docs", "benchmarks", "examples", "recipes"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns(".cache", "__pycache__", "*.png"))
    for name in ("mkdocs.yml", "pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"):
        shutil.copy(ROOT / name, tmp_path)
    page = tmp_path / "docs" / "losses.md"
    page.write_text(page.read_text() + "\n[away](commands.md#no-such-heading)\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert "no-such-heading" in done.stdout + done.stderr
