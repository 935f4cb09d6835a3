"""What MkDocs is told besides mkdocs.yml: the order of the pages, and files of the repository that they link to.

The pages are those of docs/, as one reads them in the repository. The README is the first of them. What they link to
outside of docs/ is put into the site under repository/, so that no link leads nowhere and none leads out.
"""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
EXIT_CODES = sorted(int(path.stem.rpartition("-")[2]) for path in (ROOT / "docs" / "errors").glob("exit-code-*.md"))
KINDS = {
    "Start": [
        "pages",
        "install",
        "start/laptop",
        "start/one-gpu",
        "start/eight-gpus",
        "tutorials/cluster",
        "tutorials/agent",
        "tutorials/from-trl",
        "tutorials/from-axolotl",
        "tutorials/from-atropos",
        "tutorials/from-verifiers",
        "tinker",
    ],
    "Tutorials": [
        "tutorials/first-run",
        "tutorials/own-reward",
        "tutorials/after-the-run",
        "tutorials/code",
        "tutorials/two-gpus",
        "tutorials/does-not-learn",
    ],
    "Guides": [
        "python",
        "data-and-rewards",
        "code",
        "agents",
        "environments",
        "own-environment",
        "distillation",
        "custom",
        "watching",
        "gpu-guide",
        "several-gpus",
        "scale",
        "troubleshooting",
    ],
    "Reference": [
        "configuration",
        "migration",
        "commands",
        "errors",
        *(f"errors/exit-code-{code}" for code in EXIT_CODES),
        "metrics",
        "losses",
        "models",
        "mixtures",
        "atropos-api",
    ],
    "How it works": ["architecture", "pipeline", "engines", "defects", "extending"],
}
# Titles in the menu, where the page's own is long.
TITLES = {
    "CHANGELOG.md": "Changes",
    "CONTRIBUTING.md": "Contributing",
    "SECURITY.md": "Security",
    "benchmarks/PUBLIC_FILES.md": "Files of others, tried",
    "benchmarks/RESULTS.md": "Results",
    "benchmarks/README.md": "Benchmarks",
    "benchmarks/raw/README.md": "Memory, measured",
    "benchmarks/raw/models.md": "Models, compared",
    "examples/smollm2/README.md": "Example: SmolLM2",
    "examples/vision/README.md": "Example: pictures",
    "recipes/README.md": "Recipes",
    "start/eight-gpus": "Eight GPUs",
    "tutorials/cluster": "Cluster",
    "tutorials/agent": "Agents",
    "tutorials/after-the-run": "After the run",
    "tutorials/code": "Rewards that run code",
    "tutorials/does-not-learn": "It does not learn",
    "watching": "Watching runs",
    "distillation": "Distillation and SFT",
    "gpu-guide": "GPU guide",
    "scale": "Scale",
    "commands": "Commands",
    "errors": "Errors",
    "engines": "Engines and bridges",
}
# Where a page goes that nobody has put anywhere.
OTHERS = "Guides"
# What weight the search gives a page, if not 1: who asks something wants a page that answers it before one that only
# has its words, as a history, a table of measurements or a list of all keys.
SEARCH_BOOST = {
    "repository/": 0.2,
    "index": 0.3,
    "architecture": 0.5,
    "configuration": 0.5,
    "defects": 0.3,
    "metrics": 0.5,
    "migration": 0.5,
    "gpu-guide": 2.0,
    "start/": 1.5,
    "troubleshooting": 2.0,
    "tutorials/": 1.5,
}
PROJECT = [
    "recipes/README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/RESULTS.md",
    "benchmarks/PUBLIC_FILES.md",
    "benchmarks/README.md",
    "benchmarks/raw/README.md",
    "benchmarks/raw/models.md",
    "examples/smollm2/README.md",
    "examples/vision/README.md",
]
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^\s*```.*?^\s*```\s*$", re.DOTALL | re.MULTILINE)


def pages() -> dict[str, list[str]]:
    """Files of docs/ by kind, each page once."""
    docs = ROOT / "docs"
    there = {path.relative_to(docs).with_suffix("").as_posix() for path in docs.rglob("*.md")}
    listed = {name for names in KINDS.values() for name in names}
    found = {kind: [name for name in names if name in there] for kind, names in KINDS.items()}
    found[OTHERS] += sorted(there - listed)
    return {kind: [f"{name}.md" for name in names] for kind, names in found.items()}


def site_path(path: str) -> str:
    """Where a file of the repository is in the site."""
    if path == "README.md":
        return "index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"


def linked(text: str, *, page: str) -> set[str]:
    """The files of the repository, outside of docs/, that a page of the repository links to."""
    targets = {target for *_, target in _LINK.findall(_FENCE.sub("", text))}
    found = {path for target in targets if (path := _target(target, page=page)) is not None}
    return {path for path in found if not path.startswith("docs/") and (ROOT / path).is_file()}


def relinked(text: str, *, page: str) -> str:
    """The text of a page with its links as they are in the site; a link to a folder is only its words."""

    def replaced(match: re.Match[str]) -> str:
        image, words, target = match.groups()
        path = _target(target, page=page)
        if path is None:
            return match[0]
        if (ROOT / path).is_dir():
            return words
        anchor = target.partition("#")[2]
        there = posixpath.relpath(site_path(path), posixpath.dirname(site_path(page)) or ".")
        return f"{image}[{words}]({there}{'#' + anchor if anchor else ''})"

    parts = _FENCE.split(text)
    fences = _FENCE.findall(text)
    return "".join(_LINK.sub(replaced, part) + fence for part, fence in zip(parts, [*fences, ""], strict=True))


def _target(target: str, *, page: str) -> str | None:
    """The file of the repository that a link names; None for another page of the web, or a place in this one."""
    name = target.partition("#")[0]
    if not name or re.match(r"[a-z]+:", name):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), name))


def on_config(config: Any) -> Any:
    """Set the order of the pages, and name the version and the repository."""
    kinds: list[Any] = [{kind: list(_folded(names))} for kind, names in pages().items()]
    project = [{TITLES[path]: site_path(path)} for path in PROJECT]
    config.nav = [{"Overview": "index.md"}, *kinds, {"Project": project}]
    config.copyright = f"Lachesis {_version()}, MIT license"
    if (address := _repository()) is not None:
        config.repo_url = address
        config.repo_name = address.removeprefix("https://").partition("/")[2]
    return config


def _version() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def _repository() -> str | None:
    """Return the address of the repository: $REPO_URL, or that of the remote called origin; None without one."""
    asked = subprocess.run(["git", "remote", "get-url", "origin"], cwd=ROOT, capture_output=True, text=True)
    found = os.environ.get("REPO_URL") or asked.stdout.strip()
    found = re.sub(r"^git@([^:]+):", r"https://\1/", found).removesuffix(".git")
    return found if found.startswith("https://") else None


def _folded(names: list[str]) -> Iterator[Any]:
    """Yield pages under their short titles, those of the exit codes as an entry of its own, which opens."""
    codes = [name for name in names if name.startswith("errors/")]
    for name in names:
        if name not in codes:
            title = TITLES.get(name.removesuffix(".md"))
            yield {title: name} if title else name
        if name == "errors.md":
            yield {"Exit codes": codes}


def on_files(files: Files, config: Any) -> Files:
    """Add the README, and all that pages link to."""
    waiting = ["README.md", *PROJECT, *(f"docs/{name}" for names in pages().values() for name in names)]
    known: set[str] = set()
    while waiting:
        page = waiting.pop()
        if page in known:
            continue
        known.add(page)
        if not page.startswith("docs/"):
            files.append(File.generated(config, site_path(page), abs_src_path=os.path.join(ROOT, page)))
        if page.endswith(".md"):
            waiting += linked((ROOT / page).read_text(encoding="utf-8"), page=page)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as they are in the site, and what weight the search gives the page."""
    uri = page.file.src_uri
    for beginning, boost in SEARCH_BOOST.items():
        if uri.startswith(beginning):
            page.meta["search"] = {"boost": boost}
    path = "README.md" if uri == "index.md" else uri.removeprefix("repository/")
    return relinked(markdown, page=path if uri.startswith("repository/") or uri == "index.md" else f"docs/{uri}")


def on_page_content(html: str, **_: Any) -> str:
    r"""Code in tables: bars without the backslash that GitHub wants, and keys that break between their words."""
    html = re.sub(r"<code>[^<]*</code>", lambda code: code[0].replace(r"\|", "|"), html)
    return re.sub(r"<td><code>[^<\s]*</code></td>", lambda key: re.sub(r"(\w[_./])(?=\w)", r"\1<wbr>", key[0]), html)
