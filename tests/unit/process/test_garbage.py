"""What the garbage collector is spared, in programs of their own: this one has frozen what it imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

BEGIN = """
import gc, weakref
from lachesis.process.garbage import freeze, frozen_imports, thaw
class Cycle:
    def __init__(self):
        self.me = self
"""
PROGRAMS = {
    "nothing is collected while modules are imported, and what is there is frozen": """
with frozen_imports():
    assert not gc.isenabled() and not gc.get_freeze_count()
assert gc.isenabled() and gc.get_freeze_count() > 1000
thaw()
assert not gc.get_freeze_count()
""",
    "an import that fails freezes nothing": """
try:
    with frozen_imports():
        import there.is_none
except ImportError:
    assert gc.isenabled() and not gc.get_freeze_count()
else:
    assert False
""",
    "garbage is collected and not frozen, what is frozen becomes garbage once it is thawed": """
with frozen_imports():
    pass
garbage, kept = weakref.ref(Cycle()), Cycle()
stays = weakref.ref(kept)
freeze()
assert garbage() is None
del kept
gc.collect()
assert stays() is not None
thaw()
gc.collect()
assert stays() is None
""",
    "a program that has frozen objects of its own keeps them": """
own = Cycle()
gc.freeze()
before, later = gc.get_freeze_count(), [Cycle() for _ in range(100)]
with frozen_imports():
    pass
freeze()
thaw()
assert gc.get_freeze_count() <= before
""",
    "a collector that is off stays off": """
gc.disable()
with frozen_imports():
    pass
assert not gc.isenabled()
""",
    "what stays is made without looking through it": """
from lachesis.process.garbage import uncollected
looked = []
gc.callbacks.append(lambda phase, info: looked.append(phase))
with uncollected():
    made = [[] for _ in range(100_000)]
    assert not looked
assert gc.isenabled() and not gc.get_freeze_count()
made += [[] for _ in range(100_000)]
assert looked
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_in_a_program(name: str):
    done = subprocess.run([sys.executable, "-c", BEGIN + PROGRAMS[name]], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
