"""A configuration on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lachesis.config.schema import LachesisConfig
from tests.tiny import tiny_model, tiny_tokenizer


@pytest.fixture
def config(tmp_path: Path) -> Any:
    """A configuration on a tiny model; ``train.jsonl`` has 10 problems, ``test.jsonl`` 3."""
    tiny_model("qwen2").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    for name, count in (("train", 10), ("test", 3)):
        rows = [json.dumps({"prompt": f"{name}{i}="}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))

    def build(data: dict[str, Any], **sections: Any) -> LachesisConfig:
        paths = {key: str(tmp_path / value) if key.endswith("path") else value for key, value in data.items()}
        return LachesisConfig.model_validate(
            {
                "run": {"steps": 3},
                "model": {"path": str(tmp_path / "model")},
                "sampling": {"max_completion_length": 8},
                "rewards": {"functions": ["a.b"]},
                "data": paths,
                **sections,
            }
        )

    return build
