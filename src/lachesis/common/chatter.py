"""What libraries say while they are imported, which is nothing that a user can do anything about."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_CHATTERERS = ("torchao", "torch.utils._pytree", "bitsandbytes")


@contextmanager
def without_chatter() -> Iterator[None]:
    """Libraries warn as they are imported: of kernels that they do without, of what another deprecates."""
    loggers = [logging.getLogger(name) for name in _CHATTERERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
