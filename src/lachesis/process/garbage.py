"""Garbage collection without the long-lived objects of a run, which would otherwise be scanned again and again.

Torch, transformers and their imports are half a million objects that no collection can free. A scan of them takes a
quarter of a second, several times during imports and occasionally during a step.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_frozen = _left_alone = False


@contextmanager
def frozen_imports() -> Iterator[None]:
    """Collect nothing within the block, and freeze all objects at its end: imports leave hardly any garbage."""
    with uncollected():
        yield
        _freeze()


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect nothing within the block, for making many objects that stay."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def freeze() -> None:
    """Spare the collector all existing objects except garbage, until :func:`thaw`."""
    gc.collect()
    _freeze()


def thaw() -> None:
    """Return the objects frozen here to the collector."""
    global _frozen
    if _frozen:
        gc.unfreeze()
        _frozen = False


def _freeze() -> None:
    """Freeze all objects, unless the program has frozen its own.

    Python thaws all at once, theirs with ours. Counting frozen objects takes a tenth of a second.
    """
    global _frozen, _left_alone
    _left_alone = _left_alone or (not _frozen and gc.get_freeze_count() > 0)
    if not _left_alone:
        gc.freeze()
        _frozen = True
