"""Rules about engines and the transfer of weights to them."""

from __future__ import annotations

from collections.abc import Iterator

from lachesis.common.errors import ConfigError
from lachesis.common.http import server_url
from lachesis.config.rules.base import Rule, Said, problem
from lachesis.config.schema import SERVERS_DNS, SERVERS_FILE, LachesisConfig


def _addresses(config: LachesisConfig) -> Iterator[Said]:
    """Check that addresses are valid, because a run would wait in vain for a wrong one."""
    named: dict[str, str] = {}
    if config.engine.kind == "http":
        urls = [url for url in config.engine.urls if not url.startswith(SERVERS_FILE)]
        named = {f"engine.urls {url}": url.removeprefix(SERVERS_DNS) for url in urls}
    if config.source.kind == "atropos":
        named[f"source.url {config.source.url}"] = config.source.url
    for key, url in named.items():
        try:
            server_url(url)
        except ConfigError:
            yield problem(f"{key} is not an address of a server; write it as http://127.0.0.1:PORT")


SERVING_RULES: tuple[Rule, ...] = (_addresses,)
