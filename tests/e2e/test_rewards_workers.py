"""Data prepared and rewards scored in several processes, as a whole."""

from __future__ import annotations

import json
from typing import Any

from lachesis.rollouts.datasets import Dataset, load_problems
from tests.tiny import tiny_tokenizer


def test_processes_that_prepare_data_do_not_show(tmp_path):
    tokenizer = tiny_tokenizer()
    (tmp_path / "mine.py").write_text(
        "def prompt_transform(cfg, *args, **kwargs):\n"
        "    def f(row, tokenizer=None):\n"
        "        return {'prompt': row['q'] + cfg.mark, 'length': len(tokenizer(row['q'])['input_ids'])}\n"
        "    return f, {'remove_columns': ['q']}\n"
    )
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"q": "1" * (n + 1)}) for n in range(5)))
    options: dict[str, Any] = {
        "tokenizer": tokenizer,
        "base_dir": tmp_path,
        "transform_config": {"mark": "="},
    }
    data = Dataset(str(tmp_path / "a.jsonl"), transform="mine.py:prompt_transform")
    alone = load_problems(data, **options)
    assert [prompt.columns["length"] for prompt in alone] == [1, 2, 3, 4, 5]
    assert load_problems(data, processes=2, **options) == alone
