"""Rollouts to a file and a page, without an API."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from lachesis.common.errors import DataError
from lachesis.plugins.atropos.environments.client import InferenceClient
from lachesis.plugins.atropos.environments.process import free_name, process, render
from lachesis.plugins.atropos.environments.records import UsableGroup
from lachesis.plugins.atropos.environments.settings import EnvironmentConfig, ServerConfig
from tests.unit.plugins.atropos.environments.servers import inference
from tests.unit.plugins.atropos.environments.test_runner import TOKENIZER, Numbers


class Empty(Numbers):
    """Has no problems."""

    async def get_next_item(self) -> None:
        return None


def run(path: Path, *, groups: int, kind: type[Numbers] = Numbers, **config: Any) -> Any:
    async def work(url: str) -> Any:
        client = InferenceClient(ServerConfig(base_url=(url,)))
        settings = EnvironmentConfig(max_token_length=16, include_messages=True, **config)
        try:
            environment = kind(settings, client=client, tokenizer=TOKENIZER)
            return await process(environment, groups=groups, path=path)
        finally:
            await client.close()

    with inference() as (_, url):
        return asyncio.run(work(url))


def test_files(tmp_path):
    rollouts, page, counters = run(tmp_path / "sub" / "numbers.jsonl", groups=3)
    assert (counters.groups, counters.sequences) == (3, 12)
    groups = [json.loads(line) for line in rollouts.read_text().splitlines()]
    assert len(groups) == 3 and groups[0]["messages"][0][-1]["role"] == "assistant"
    assert page == rollouts.with_suffix(".html") and "3 groups, 12 sequences" in page.read_text()
    again, _, _ = run(tmp_path / "sub" / "numbers.jsonl", groups=1)
    assert again.name == "numbers_1.jsonl" and len(rollouts.read_text().splitlines()) == 3


def test_problems_run_out(tmp_path):
    _, _, counters = run(tmp_path / "a.jsonl", groups=9, max_num=2)
    assert counters.groups == 2
    with pytest.raises(DataError, match="made no group"):
        run(tmp_path / "b.jsonl", groups=1, kind=Empty)


def test_free_names(tmp_path):
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "a_1.jsonl").touch()
    assert free_name(tmp_path / "a.jsonl").name == "a_2.jsonl"
    assert free_name(tmp_path / "b.jsonl").name == "b.jsonl"


EVIL = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7*7 }}"


def test_texts_of_models_are_escaped():
    group = {
        "tokens": [[0, 1, 2, 3]], "masks": [[-100, 1, -100, 3]], "scores": [0.5],
        "inference_logprobs": [[1.0, -0.1, 1.0, -9.0]], "overrides": [{"finish_reason": EVIL}],
    }  # fmt: skip
    page = render([UsableGroup(**group)], pieces=lambda ids: [EVIL for _ in ids], title=EVIL)
    assert "<script>alert" not in page and "<img" not in page and "{{ 7*7 }}" in page
    assert "default-src 'none'" in page and "http" not in page.replace("http-equiv", "")


def test_tokens_are_coloured_by_mask_and_probability():
    group = {
        "tokens": [[10, 11, 12, 13]], "masks": [[-100, 11, -100, 13]], "scores": [0.5],
        "inference_logprobs": [[1.0, -0.01, 1.0, -1.5]],
        "overrides": [{"weight_version": {"first": 3, "last": 4}}],
    }  # fmt: skip
    page = render([UsableGroup(**group)], pieces=lambda ids: [f"t{token}" for token in ids], title="x")
    assert '<pre class="prompt">t10</pre>' in page
    assert '<span title="11: p = 0.99, logprob -0.010">t11</span>' in page
    assert '<span class="given" title="12: given, not trained">t12</span>' in page
    assert '<span class="p4" title="13: p = 0.223, logprob -1.500">t13</span>' in page
    assert "weights 3–4" in page
