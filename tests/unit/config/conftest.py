"""A smallest valid configuration, as data, as a file and as an object."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lachesis.config.schema import LachesisConfig

MINIMAL = """\
run:
  steps: 10
model:
  path: org/model
data:
  path: train.jsonl
rewards:
  functions: [rewards.exact]
"""


@pytest.fixture
def minimal() -> str:
    return MINIMAL


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Writes config.yaml into a directory of its own and returns its path."""

    def write_text(text: str) -> Path:
        path = tmp_path / "configs" / "config.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write_text


@pytest.fixture
def build() -> Callable[..., LachesisConfig]:
    """A valid configuration with some sections extended: ``build(sampling={"top_p": 0.9})``."""

    def build_config(**sections: dict[str, Any]) -> LachesisConfig:
        data: dict[str, dict[str, Any]] = {
            "run": {"steps": 10},
            "model": {"path": "org/model"},
            "data": {"path": "train.jsonl"},
            "rewards": {"functions": ["rewards.exact"]},
        }
        for name, values in sections.items():
            data[name] = {**data.get(name, {}), **values}
        return LachesisConfig.model_validate(data)

    return build_config
