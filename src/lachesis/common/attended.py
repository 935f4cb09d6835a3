"""Calls that block, with someone who looks around meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")

Watch = Callable[[], None]
"""Called while something is waited for; raises where waiting on has become useless."""

_LOOK_S = 0.2


def attended(call: Callable[[], T], *, watch: Watch) -> T:
    """What ``call`` returns or raises. ``watch`` is called several times a second until then.

    Where ``watch`` raises, that is raised at once and the call is left behind, in a thread that does not keep the
    process from ending.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # raised again where it is waited for
            outcome.set_exception(error)

    threading.Thread(target=run, name="lachesis-attended", daemon=True).start()
    while not wait([outcome], timeout=_LOOK_S).done:
        watch()
    return outcome.result()
