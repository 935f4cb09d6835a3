"""docs/metrics.md says what the table of metrics and the health rules say."""

from __future__ import annotations

import importlib.util

from lachesis.metrics.health.monitor import RULES
from lachesis.plugins.dialects.commands.keys import summary
from lachesis.plugins.report.metric_descriptions import METRICS
from tests.paths import DOCS

GENERATOR = DOCS / "generate_metrics.py"


def test_the_committed_page_is_up_to_date_and_whole():
    spec = importlib.util.spec_from_file_location("generate_metrics", GENERATOR)
    assert spec is not None and spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    page = GENERATOR.with_name("metrics.md").read_text(encoding="utf-8")
    assert page == generator.render(), "run: python docs/generate_metrics.py"
    for name in METRICS:
        assert f"\n`{name}` | " in page
    for name, rule in RULES.items():
        _, found, section = page.partition(f"\n### {name}\n")
        assert found and summary(rule) in section.partition("\n### ")[0], f"{name} has no place"
    assert "| . |\n" not in page and "|  |\n" not in page, "a rule or metric without a sentence"
