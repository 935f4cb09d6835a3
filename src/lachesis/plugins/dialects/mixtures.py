"""Datasets of other trainers' files: one by name, or several as a mixture."""

from __future__ import annotations

from typing import Any

from lachesis.common.json_values import is_list, is_object
from lachesis.config.document import describe
from lachesis.plugins.dialects.table import Translation

ROW_KEYS = ("path", "name", "split")


def put_datasets(translation: Translation) -> None:
    """Set ``data``: TRL's ``datasets`` take precedence over ``dataset_name``, as there."""
    rows = [row for row in translation.value("datasets", []) if is_object(row)]
    found = [dataset_of(translation, f"datasets[{index}]", row) for index, row in enumerate(rows)]
    _put(translation, "datasets", found)
    _put_mixture(translation)
    _put_prompts(translation)


def _put(translation: Translation, name: str, datasets: list[dict[str, Any]]) -> None:
    for key, value in datasets[0].items() if datasets else ():
        translation.put(f"data.{key}", value, name)
    if len(datasets) > 1:
        translation.put("data.more", datasets[1:], name)


def dataset_of(translation: Translation, name: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of ``datasets:`` as one of ours. ``data_files`` with one file is that file."""
    dataset = {key: row[key] for key in ROW_KEYS if row.get(key) is not None}
    files = row.get("data_files")
    if is_list(files) and len(files) == 1:
        files = files[0]
    if isinstance(files, str):
        dataset["path"] = files
    elif files is not None:
        translation.problem(f"{name}.data_files", "Lachesis reads one file a dataset; list the files as datasets")
    return dataset


def _put_mixture(translation: Translation) -> None:
    """Set open-r1's ``dataset_mixture``: its datasets by ``id``, each completely."""
    name = "dataset_mixture"
    mixture = translation.value(name, {})
    if not is_object(mixture) or not is_list(mixture.get("datasets", [])):
        translation.problem(name, f"expected datasets and their ids, got {describe(mixture)}")
        return
    datasets: list[dict[str, Any]] = []
    for row in mixture.get("datasets", []):
        if not is_object(row) or not isinstance(row.get("id"), str):
            translation.problem(name, f"expected an id, got {describe(row)}")
            continue
        if row.get("weight") not in (None, 1, 1.0):
            translation.problem(
                name, f"Lachesis takes whole splits: {row['id']} has weight {row['weight']}; write split: train[:N]"
            )
        renamed = {"path": row["id"], "name": row.get("config"), "split": row.get("split")}
        datasets.append({key: value for key, value in renamed.items() if value is not None})
    _put(translation, name, datasets)
    if mixture.get("test_split_size") is not None:
        translation.put("data.eval_size", mixture["test_split_size"], name)


def _put_prompts(translation: Translation) -> None:
    """Set the prompt column, which open-r1 makes the user's message, and the length limit of older versions of TRL."""
    column, limit = "dataset_prompt_column", "max_prompt_length"
    if translation.has(column):
        translation.put("data.prompt_column", translation.value(column), column)
        translation.put("data.conversations", True, column)
    if translation.has(limit):
        translation.put("data.max_prompt_length", translation.value(limit), limit)
        put_dropped_prompts(translation, limit)


def put_dropped_prompts(translation: Translation, name: str) -> None:
    """Leave out prompts that another trainer truncates to the length under ``name``, with a finding."""
    translation.put("data.overlong_prompts", "drop", name)
    translation.warning(name, "longer prompts are left out here; there they are truncated, which asks another question")
