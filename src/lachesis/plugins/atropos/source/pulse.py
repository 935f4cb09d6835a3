"""The pulse of a rollout API, and of the environments that it hears from."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

import httpx

from lachesis.run.pulse import SILENCE_S, Pulse

logger = logging.getLogger("lachesis")


def api_pulses(url: str) -> list[Pulse]:
    """Return the pulses that notice a silent API at ``url``, and an environment that is silent to it."""
    return [
        Pulse(f"the rollout API at {url}", f"{url}/healthz", lambda: None),
        EnvironmentsPulse("the environments", f"{url}/overview", lambda: None),
    ]


@dataclass(slots=True)
class EnvironmentsPulse(Pulse):
    """Pulse of environments, as the API records it: they ask it several times a second if there is room.

    The original's environments ask nothing while they evaluate.
    """

    _silent: dict[str, float] = field(default_factory=dict[str, float])
    _answers_since: float | None = None

    def look(self, client: httpx.Client) -> None:
        """Log which environments are silent, and which have resumed. Without an answer nothing is known of them."""
        try:
            found = client.get(self.health_url or "").json()["environments"]
        except (httpx.HTTPError, OSError, ValueError, KeyError, TypeError):
            self._answers_since = None
            return
        now = time.monotonic()
        self._answers_since = self._answers_since or now
        for name, seconds in {one["name"]: one["silent_s"] for one in found if one["state"] == "here"}.items():
            if min(seconds, now - self._answers_since) <= SILENCE_S:
                if name in self._silent:
                    logger.warning("the environment %s has resumed after %.0f s", name, now - self._silent.pop(name))
            elif name not in self._silent:
                self._silent[name] = now - seconds
                told = "the environment %s has not contacted the rollout API for %.0f s: it is stopped or stuck"
                logger.warning(told, name, seconds)
