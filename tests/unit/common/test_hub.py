"""What of a model is on this machine, in a directory or in the hub's cache."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from lachesis.common.errors import ModelError
from lachesis.common.hub import config_here, load_errors, mentions

REVISIONS = {"main": "a" * 40, "older": "b" * 40}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's, with two revisions of one model."""
    model = tmp_path / "models--someone--model"
    for name, commit in REVISIONS.items():
        (model / "snapshots" / commit).mkdir(parents=True)
        (model / "snapshots" / commit / "config.json").write_text(f'{{"revision": "{name}"}}')
        (model / "refs").mkdir(exist_ok=True)
        (model / "refs" / name).write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return model


@pytest.mark.parametrize(("revision", "found"), [(None, "main"), ("older", "older"), (REVISIONS["older"], "older")])
def test_a_configuration_is_that_of_the_revision_that_has_been_downloaded(
    cache: Path, revision: str | None, found: str
):
    there = config_here("someone/model", revision=revision)
    assert there == cache / "snapshots" / REVISIONS[found] / "config.json"


@pytest.mark.parametrize("model", ["someone/other", "/no/such/directory", "", "--flag"])
def test_there_is_none_of_what_has_not_been_downloaded_or_is_no_model(cache: Path, model: str):
    assert config_here(model) is None and mentions(model, "revision") is None


def test_a_directory_comes_first(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    own = tmp_path / "someone" / "model"
    own.mkdir(parents=True)
    (own / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert config_here("someone/model") == Path("someone/model/config.json")


@pytest.mark.parametrize("path", ["/nowhere/model", "./model", "runs/first/final"])
def test_a_path_that_does_not_exist_is_not_taken_for_a_name_of_the_hub(path: str):
    found = pytest.raises(ModelError, match=f"the model's directory {path} does not exist -> check model.path")
    with found, load_errors(path):
        pytest.fail("it was looked for")


def test_words_are_looked_for_as_they_are_written(cache: Path):
    assert mentions("someone/model", "vision", "revision") is True
    assert mentions("someone/model", "Revision") is False
