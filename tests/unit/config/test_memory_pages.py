"""The GPU guide, the page on scale and the table of results are what plan and the measured steps say now."""

from __future__ import annotations

import importlib.util
import json
from types import ModuleType

import pytest

from tests.paths import DOCS, ROOT


def generator(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["generate_gpu_guide", "generate_scale"])
def test_pages_do_not_drift(name: str):
    made = generator(name)
    assert made.TARGET.read_text() == made.render(), f"run: python docs/{name}.py"


def test_the_table_of_results_does_not_drift():
    guide = generator("generate_gpu_guide")
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    assert results == guide.with_measured(results), "run: python docs/generate_gpu_guide.py"


def test_plan_is_within_a_tenth_of_what_was_measured():
    guide = generator("generate_gpu_guide")
    assert guide.largest_error(json.loads(guide.MEASURED.read_text())) < 0.1
