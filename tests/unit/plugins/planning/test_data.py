"""What a plan finds out about a local file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lachesis.common.errors import DataError, RewardError
from lachesis.config.schema import LachesisConfig
from lachesis.plan.plan import plan, with_images
from lachesis.plugins.planning.data import check_reward_columns, sample_data
from tests import pictures
from tests.tiny import tiny_tokenizer


def configured(directory: Path, rows: list[dict[str, Any]], **sections: Any) -> LachesisConfig:
    file = directory / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    base: dict[str, Any] = {
        "run": {"steps": 1},
        "model": {"path": str(directory)},
        "data": {"path": str(file)},
        "rewards": {"functions": [f"{directory / 'rewards.py'}:score"]},
    }
    return LachesisConfig.model_validate(base | sections)


def test_the_longest_of_the_first_thousand_prompts_counts(tmp_path: Path):
    rows = [{"prompt": "a" * length, "answer": "1"} for length in (30, 300, 90)]
    config = configured(tmp_path, [*rows, *rows[:1] * 997, {"prompt": "a" * 9000}])
    sample = sample_data(config)
    assert sample is not None and (sample.rows, sample.columns) == (1000, {"prompt", "answer"})
    assert 100 <= sample.longest <= 120, "three letters a token, where the tokenizer is not known"
    shorter = plan(config, device="cpu", prompt_tokens=sample.longest)
    assert shorter.lengths.longest == sample.longest + config.sampling.max_completion_length
    assert plan(config, device="cpu").lengths.longest > shorter.lengths.longest
    assert not [note for note in shorter.notes if "max_prompt_length" in note]


def test_the_models_own_tokenizer_counts_and_so_do_messages(tmp_path: Path):
    tiny_tokenizer().save_pretrained(tmp_path)
    messages = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "defg"}]
    sample = sample_data(configured(tmp_path, [{"prompt": messages}]))
    assert sample is not None and sample.longest == 7 + 2 * 12


def test_a_file_without_prompts_is_no_plan(tmp_path: Path):
    with pytest.raises(DataError, match="no prompt in column 'prompt'; the columns with values are: query, answer"):
        sample_data(configured(tmp_path, [{"query": "1+1?", "answer": "2"}]))


def test_gsm8k_is_planned_for_as_it_comes(tmp_path: Path):
    sample = sample_data(configured(tmp_path, [{"question": "1+1?", "answer": "<<1+1=2>>\n#### 2"}]))
    assert sample is not None and sample.columns == {"question", "answer", "solution"}


def test_what_is_no_local_file_of_prompts_is_not_read(tmp_path: Path):
    assert sample_data(configured(tmp_path, [], data={"path": "openai/gsm8k"})) is None
    transformed = {"path": str(tmp_path / "rows.jsonl"), "transform": "a.b"}
    assert sample_data(configured(tmp_path, [{"prompt": "a"}], data=transformed)) is None


@pytest.mark.parametrize(("needs", "missing"), [("answer", False), ("solution", True), ("completion_ids", False)])
def test_a_column_that_a_reward_needs_and_the_file_lacks_is_found(tmp_path: Path, needs: str, missing: bool):
    (tmp_path / "rewards.py").write_text(f"def score(completions, {needs}, other=None, **columns): return []\n")
    config = configured(tmp_path, [{"prompt": "1+1", "answer": "2"}])
    sample = sample_data(config)
    assert sample is not None
    if missing:
        with pytest.raises(RewardError, match=r"'score' needs 'solution', .* nor a column of the dataset"):
            check_reward_columns(config, sample)
    else:
        check_reward_columns(config, sample)


def test_images_are_counted_by_the_processors_rule_and_so_is_their_tower(tmp_path: Path):
    pictures.save(tmp_path)
    (tmp_path / "red.png").write_bytes(pictures.png("red"))
    rows = [{"prompt": "what colour", "images": ["red.png"] * count, "answer": "red"} for count in (1, 2)]
    config = configured(tmp_path, rows)
    sample = sample_data(config)
    assert sample is not None
    each = pictures.PER_IMAGE + 3  # with the tokens around it
    assert sample.images == 2 * each
    of_text = sample_data(configured(tmp_path, [{"prompt": "what colour", "answer": "red"}]))
    assert of_text is not None
    assert (of_text.images, sample.longest - of_text.longest) == (0, 2 * each)

    blind, seen = (
        plan(one, device="cpu", prompt_tokens=sample.longest, image_tokens=tokens)
        for one, tokens in ((config, 0), (with_images(config), sample.images))
    )
    assert not [part for part in blind.memory if part.name in ("vision tower", "images")]
    parts = {part.name: part.bytes for part in seen.memory if part.place == "trainer"}
    assert seen.shape is not None and seen.shape.tower is not None
    assert parts["vision tower"] == 4 * seen.shape.tower.parameters
    assert parts["images"] > 0
    assert seen.trained == blind.trained, "the tower is frozen"
    trained = config.model_copy(update={"model": config.model.model_copy(update={"vision": "trained"})})
    of_trained = plan(with_images(trained), device="cpu", prompt_tokens=sample.longest, image_tokens=sample.images)
    assert of_trained.trained == seen.trained + seen.shape.tower.parameters
