"""The addresses of a configuration: servers that have to answer, and ports to be free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

import httpx

from lachesis.common.deadline import Deadline
from lachesis.common.errors import EngineError, EngineUnreachable, LachesisError
from lachesis.common.hosts import is_this_machine
from lachesis.common.http import server_url
from lachesis.config.schema import ChannelBridgeConfig, HttpEngineConfig, LachesisConfig
from lachesis.engines.build import server_urls
from lachesis.engines.http.control import ServerControl, tls
from lachesis.plugins.atropos.section import AtroposSourceConfig
from lachesis.plugins.checks.findings import Check, attempted, failure
from lachesis.process.managed import check_port_free
from lachesis.transport.rendezvous import address_towards, listen

# Of one server to answer; all are asked at once.
LIMIT_S = 5.0
_AT_ONCE = 32
_KEY_WANTED = (401, 403)


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that the run expects to be running.

    Args:
        what: its kind, for the line.
        route: is asked first; it needs no key, or ``keyed``: a refusal without one counts as an answer.
        ask: asks it more, and returns words; raises if it is another kind of server.
        awaited_s: how long a run waits for it.
        startable: ``lachesis run`` starts one here, if there is none.
    """

    what: str
    url: str
    route: str
    ask: Callable[[], str] = lambda: "answers"
    keyed: bool = False
    awaited_s: float = 0.0
    startable: bool = False


def try_servers(config: LachesisConfig) -> Iterator[Check]:
    """Ask the servers of the configuration that run already, all at once."""
    servers = [*_engines(config), *_others(config)]
    if not servers:
        yield Check("servers", "none is to run already", applies=False)
        return
    with ThreadPoolExecutor(min(_AT_ONCE, len(servers))) as threads:
        yield from list(threads.map(_tried, servers))


def _tried(server: RunningServer) -> Check:
    """Return what a server answers, or that a run starts it or waits for it, or its error."""
    try:
        return Check(server.what, f"{server.url} {ask(server)}")
    except EngineUnreachable as error:
        if server.startable and _is_free(server.url):
            words = "is free for the rollout API that `lachesis run` starts; other commands need one there before"
            return Check(server.what, f"{server.url} {words}", applies=False)
        if server.awaited_s:
            words = f"{error.message}; a run waits {server.awaited_s:g} s for it (engine.wait_s)"
            return Check(server.what, words, applies=False)
        return failure(server.what, error)
    except LachesisError as error:
        return failure(server.what, error)


def ask(server: RunningServer) -> str:
    """Return what a server says. Raises EngineUnreachable if it does not answer, EngineError if it is another kind."""
    limit = f"limit {LIMIT_S:.0f} s"
    try:
        answer = httpx.get(server.url + server.route, timeout=LIMIT_S, verify=tls(server.url), trust_env=False)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise EngineUnreachable(
            f"{server.url} does not answer ({limit}): {error or type(error).__name__}",
            remedy="start it, or correct the address; one elsewhere has to listen on more than 127.0.0.1",
        ) from error
    if not answer.is_success and not (server.keyed and answer.status_code in _KEY_WANTED):
        raise EngineError(
            f"{server.url}{server.route} answers {answer.status_code}",
            remedy="see whether the address is that of another server",
        )
    return f"{server.ask()} ({limit})"


def _engines(config: LachesisConfig) -> Iterator[RunningServer]:
    if isinstance(config.engine, HttpEngineConfig):
        for url in server_urls(config):
            name, wait_s = f"engine {urlsplit(url).netloc}", config.engine.wait_s
            yield RunningServer(name, url, "/bridge/info", partial(_engine_says, url), awaited_s=wait_s)


def _engine_says(url: str) -> str:
    """Describe an engine. Raises EngineError if it is not a server of ours."""
    with closing(ServerControl(url)) as control:
        info = control.info(deadline=Deadline(f"the doctor: what {url} says of itself", LIMIT_S))
    return f"{info.engine} engine at weight version {info.weight_version}"


def _others(config: LachesisConfig) -> Iterator[RunningServer]:
    if isinstance(config.source, AtroposSourceConfig):
        from lachesis.plugins.atropos.source.client import api_url

        url, startable = api_url(config.source.url), config.services.api is not None
        yield RunningServer("rollout API", url, "/info", partial(_api_says, url), startable=startable)
    teacher = config.algorithm.teacher
    if teacher is not None and teacher.kind == "url" and teacher.url is not None:
        yield RunningServer("teacher", server_url(teacher.url), "/v1/models", keyed=True)


def _api_says(url: str) -> str:
    """Describe a rollout API. Raises EngineError if it is not one."""
    from lachesis.plugins.atropos.source.client import RolloutApiClient

    with closing(RolloutApiClient(url)) as client:
        client.require(limit_s=LIMIT_S)
    return "is a rollout API"


def _is_free(url: str) -> bool:
    """Return True if a server can be started at this address of this machine."""
    try:
        check_port_free(url)
    except LachesisError:
        return False
    return is_this_machine(url)


def try_ports(config: LachesisConfig) -> Iterator[Check]:
    """See that ports are free on which a run listens: for its servers, and for trainer and engine to meet."""
    listens = False
    if config.engine.place == "run":
        for url in server_urls(config):
            listens = True
            yield attempted(f"port {urlsplit(url).netloc}", partial(_free_port, url))
    if isinstance(config.bridge, ChannelBridgeConfig):
        listens = True
        yield attempted("rendezvous", partial(_rendezvous, config, config.bridge))
    if not listens:
        yield Check("ports", "none is listened on", applies=False)


def _free_port(url: str) -> Check:
    check_port_free(url)
    return Check(f"port {urlsplit(url).netloc}", "free for the engine that a run starts")


def _rendezvous(config: LachesisConfig, bridge: ChannelBridgeConfig) -> Check:
    chosen = bridge.init_method or f"tcp://{address_towards(server_urls(config))}:0"
    found = listen(chosen)
    found.listener.close()
    which = "bridge.init_method" if bridge.init_method else "any free port of the address by which engines reach us"
    return Check("rendezvous", f"{chosen} is free ({which})")
