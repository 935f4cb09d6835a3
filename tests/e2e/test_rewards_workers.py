"""Data prepared and rewards scored in several processes, as a whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from lachesis.rollouts.datasets import Dataset, load_problems
from tests.e2e.runs import rewards, run_here, write_run
from tests.long import long_but
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


@pytest.mark.parametrize(
    "dialect",
    long_but(
        ["trl", "axolotl"],
        short=["trl"],
        why="test_a_reward_of_trls_quick_start_runs_as_published[trl]: another dialect",
    ),
)
def test_a_reward_of_trls_quick_start_runs_as_published(tmp_path, dialect: str):
    """On text prompts: with messages in the place of texts it gives -19 to everything."""
    write_run(tmp_path)
    (tmp_path / "quick.py").write_text(
        "def reward_len(completions, **kwargs):\n"
        "    return [-abs(20 - len(completion)) for completion in completions]\n"
    )
    files = {
        "trl": {
            "model_name_or_path": str(tmp_path / "model"),
            "dataset_name": str(tmp_path / "problems.jsonl"),
            "reward_funcs": f"{tmp_path / 'quick.py'}:reward_len",
            "per_device_train_batch_size": 16,
            "num_generations": 8,
            "max_completion_length": 6,
        },
        "axolotl": {
            "base_model": str(tmp_path / "model"),
            "rl": "grpo",
            "datasets": [{"path": str(tmp_path / "problems.jsonl")}],
            "micro_batch_size": 16,
            "trl": {
                "reward_funcs": [f"{tmp_path / 'quick.py'}:reward_len"],
                "num_generations": 8,
                "max_completion_length": 6,
            },
        },
    }
    path = tmp_path / "theirs.yaml"
    path.write_text(yaml.safe_dump(files[dialect] | {"max_steps": 2, "output_dir": str(tmp_path / "out")}))
    given = rewards(run_here(path).run_dir)
    assert len(given) == 2 and all(-20 <= reward <= -14 and reward != -19 for reward in given)
