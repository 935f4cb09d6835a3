from __future__ import annotations

import logging
import os

import pytest

import lachesis.__main__
import lachesis.cli.base
from lachesis.cli.base import end_with_parent
from lachesis.common.errors import LachesisError


def test_what_libraries_say_at_their_import_is_not_on_the_screen():
    """Without a handler Python prints warnings itself; torch gives its deprecations a handler of its own."""
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger().handlers)
    assert logging.getLogger("torch.utils._pytree").level == logging.ERROR
    assert callable(lachesis.__main__.main)


def test_no_bars_of_datasets_appear(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HF_DATASETS_DISABLE_PROGRESS_BARS", raising=False)
    lachesis.cli.base.quiet_libraries()
    assert os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] == "1"
    monkeypatch.setenv("HF_DATASETS_DISABLE_PROGRESS_BARS", "0")
    lachesis.cli.base.quiet_libraries()
    assert os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] == "0", "the user's own choice stays"


def test_a_rank_ends_once_torchrun_has():
    parents = iter([7, 7, 7, 1])
    ended: list[LachesisError] = []
    end_with_parent(end=ended.append, parent=lambda: next(parents), every_s=0.0).join()
    (error,) = ended
    assert error.message == "torchrun (process 7) has ended, so its ranks end too"
