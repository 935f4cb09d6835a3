"""Wait policy of OpenMP's threads; it imports almost nothing, because torch reads the policy when it is loaded."""

from __future__ import annotations

from collections.abc import Mapping

# Turns of a loop in which a thread looks for work before it sleeps: about a quarter of a millisecond. Operations of a
# small model follow one another faster than a thread wakes up, so without this a step takes 1.7 times as long. A thread
# that kept spinning would take cores from everything else while it waits.
_SPINS = 5_000


def brief_waits(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that make waiting threads spin for a moment and then sleep.

    The result is empty if the environment sets a policy already.
    """
    if "OMP_WAIT_POLICY" in environment:
        return {}
    spins = environment.get("GOMP_SPINCOUNT", str(_SPINS))
    # The policy is for libraries without a setting for the number of turns.
    return {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": spins}
