"""Publish the site as one version among others: `python docs/publish.py DIRECTORY`, from which a web server serves it.

DIRECTORY/0.1.0 is the site of version 0.1.0. Versions that are there already stay; each page has a menu of them all,
which the theme fills from DIRECTORY/versions.json, and DIRECTORY/index.html leads to the newest.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mkdocs.commands.build import build
from mkdocs.config import load_config
from packaging.version import Version

import lachesis

ROOT = Path(__file__).parents[1]
NEWEST = '<!doctype html><title>Lachesis</title><meta http-equiv="refresh" content="0; url={newest}/index.html">\n'


def publish(directory: Path, *, version: str = lachesis.__version__) -> None:
    """Build the site, strictly, in the place of any of the same version."""
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(directory.resolve() / version), strict=True)
    config.extra["version"] = {"provider": "mike"}  # whose versions.json the theme reads
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    config.plugins.on_shutdown()
    list_versions(directory)


def list_versions(directory: Path) -> None:
    """Write what versions there are, the newest first, and lead to that."""
    versions = sorted((path.parent.name for path in directory.glob("*/sitemap.xml")), key=Version, reverse=True)
    listed = [{"version": name, "title": name, "aliases": []} for name in versions]
    (directory / "versions.json").write_text(json.dumps(listed, indent=2) + "\n")
    (directory / "index.html").write_text(NEWEST.format(newest=versions[0]))


if __name__ == "__main__":
    publish(Path(sys.argv[1]))
