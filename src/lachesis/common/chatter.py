"""Log messages and progress bars of libraries, which would appear among our own lines."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_CHATTERERS = ("torchao", "torch.utils", "bitsandbytes", "transformers.modeling_utils", "transformers.distributed")


@contextmanager
def without_chatter() -> Iterator[None]:
    """Silence warnings of libraries in the block: missing kernels, deprecations, tensors that Lachesis refuses."""
    loggers = [logging.getLogger(name) for name in _CHATTERERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def hide_progress_bars() -> None:
    """Hide the progress bars of transformers, shown while weights are loaded and saved."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
