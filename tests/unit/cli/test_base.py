from __future__ import annotations

import logging

import lachesis.__main__
import lachesis.cli.base


def test_what_libraries_say_at_their_import_is_not_on_the_screen():
    """Without a handler Python prints warnings itself; torch gives its deprecations a handler of its own."""
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger().handlers)
    assert logging.getLogger("torch.utils._pytree").level == logging.ERROR
    assert callable(lachesis.__main__.main)
