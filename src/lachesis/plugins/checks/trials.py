"""All that is tried for a configuration, from what takes a moment to what takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from lachesis.common.errors import LachesisError
from lachesis.config.schema import LachesisConfig
from lachesis.plugins.checks.disk import try_disk
from lachesis.plugins.checks.findings import Check, attempted, failure
from lachesis.plugins.checks.network import try_ports, try_servers
from lachesis.plugins.checks.ranks import try_ranks
from lachesis.plugins.checks.transfer import try_transfer


def trials(config: LachesisConfig) -> Iterator[Check]:
    """Yield one check after the other; a failure of one keeps no other from being tried."""
    for subject, several in (("servers", try_servers), ("ports", try_ports)):
        try:
            yield from several(config)
        except LachesisError as error:
            yield failure(subject, error)
    for subject, one in (("disk speed", try_disk), ("two ranks", try_ranks), ("bridge", try_transfer)):
        yield attempted(subject, partial(one, config))
