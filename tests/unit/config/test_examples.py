"""Every example is a configuration that can run."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from lachesis.config.keys import find_section
from lachesis.config.load import load_argv, load_config
from lachesis.config.rules import check
from tests.paths import EXAMPLES

FILES = sorted(path for path in EXAMPLES.rglob("*.yaml") if ".cache" not in path.parts and "runs" not in path.parts)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_an_example(path: Path, monkeypatch):
    monkeypatch.chdir(path.parent)
    loaded = load_config(path)
    findings = [*loaded.findings, *check(loaded.config)]
    said = [finding.message for finding in findings if finding.level != "note"]
    assert [message for message in said if "is not built yet" not in message] == []
    for spec in loaded.config.rewards.functions:
        file, colon, function = spec.rpartition(":")
        if not colon:
            assert spec.startswith(("grpo_code.", "lachesis."))
            continue
        assert f"def {function}(" in Path(file).read_text()


def test_there_is_one_for_each_bridge():
    kinds = {load_config(path).config.bridge.kind for path in EXAMPLES.glob("bridges/*.yaml")}
    section = find_section("bridge")
    assert section is not None and kinds == set(section.kinds) - {"custom"}  # which docs/custom.md has


def test_the_flags_of_the_atropos_trainer():
    loaded = load_argv(shlex.split((EXAMPLES / "atropos" / "trainer.flags").read_text()))
    check(loaded.config)
    assert loaded.config.source.kind == "atropos"
    assert loaded.config.source.batch_size == 16
    assert loaded.config.bridge.kind == "lora_only"
