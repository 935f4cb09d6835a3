"""`lachesis run` on a Ray cluster: starts and restarts of processes on its nodes, and the end of the run.

The processes are those of any other launcher: `lachesis train` with torchrun's environment, `lachesis vllm-serve`, the
rollout API, the environment. The ranks find their engines in a file of addresses, which is rewritten when an engine
has come up on another node.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import httpx

from lachesis.common.errors import DeadlineExceeded, LachesisError, StopRequested
from lachesis.common.files import write_atomic
from lachesis.config.load import LoadedConfig, dump_config, log_findings
from lachesis.config.rules import check
from lachesis.plugins.cluster.layout import derive_layout, of_engine
from lachesis.plugins.cluster.placement import (
    JOB_TOKEN,
    SESSION_TOKEN,
    Lost,
    Place,
    RayJob,
    Task,
    api_url_at,
    config_of_ranks,
    engine_bundle,
    engine_task,
    engine_url,
    failure,
    machines_of,
    passed_on,
    preflight_tasks,
    service_task,
    spread,
)
from lachesis.plugins.cluster.ray_cluster import RayCluster, connected
from lachesis.plugins.cluster.ray_ranks import Ranks
from lachesis.plugins.cluster.ray_services import Service, Watch
from lachesis.process.managed import answers
from lachesis.run.requests import ask

logger = logging.getLogger("lachesis")

# How long hosts may take to end what they have started.
_CLOSE_S = 45.0
# As `lachesis cluster preflight` ends where it finds a problem.
_DOES_NOT_FIT = 1
Say = Callable[[str], None]


def run_on_ray(
    load: Callable[[int | None], LoadedConfig],
    *,
    resume: bool = False,
    overwrite: bool = False,
    say: Say,
    stop_requested: Callable[[], bool] = lambda: False,
) -> None:
    """Run to the end on the cluster of RAY_ADDRESS, or on the one that this machine is part of.

    Args:
        load: loads the configuration for a number of ranks, by which files of Axolotl and TRL multiply batches.
        resume: continue from the last checkpoint in the run directory.
        overwrite: replace an existing run.
        say: gets the lines of rank 0.
        stop_requested: True has the run end after its step, with a checkpoint.

    Raises:
        LachesisError: one of its subclasses: that of the process whose failure ended the run.
    """
    with connected() as cluster:
        config = load(None).config
        layout = derive_layout(config, machines_of(list(cluster.nodes().values()), config))
        loaded = load(layout.ranks if layout.ranks > 1 else None)
        log_findings(loaded.findings)
        check(loaded.config, located=loaded.located, name=loaded.name)  # rank 0 says what is no problem
        config = loaded.config
        run_dir = config.run.directory
        tokens = {name: secrets.token_hex(32) for name in (JOB_TOKEN, SESSION_TOKEN)}
        environment = passed_on(config, os.environ) | tokens
        job = RayJob(config, layout, run_dir.with_name(f"{run_dir.name}-ray"), environment)
        say(f"{layout.summary}; logs in {job.directory}")
        options = (["--resume"] if resume else []) + (["--overwrite"] if overwrite else [])
        with closing(RayRun(job, cluster, options=options, say=say, stop_requested=stop_requested)) as run:
            run.run()


class RayRun:
    """One run: its ranks, and the services beside them."""

    def __init__(
        self,
        job: RayJob,
        cluster: RayCluster,
        *,
        options: Sequence[str],
        say: Say,
        stop_requested: Callable[[], bool],
    ) -> None:
        self._job, self._cluster, self._options, self._say = job, cluster, options, say
        self._stop_requested, self._stop_asked = stop_requested, False
        self._watch = Watch(cluster)
        self._ranks: Ranks | None = None
        self._engines: list[Service] = []
        self._api: Service | None = None
        self._environment: Service | None = None
        self._environment_knows: list[str] = []
        self._http = httpx.Client(trust_env=False)
        self._log = _Tail(job.directory / "rank-0.log")

    def run(self) -> None:
        """Place everything, look at the nodes, start, and start again what fails, until rank 0 is done."""
        job = self._job
        job.directory.mkdir(parents=True, exist_ok=True)
        write_atomic(job.engine_config, dump_config(of_engine(job.config)))
        ranks = self._ranks = Ranks(job, self._watch, options=self._options, meanwhile=self._meanwhile)
        ranks.settle()
        self._place_engines(ranks)
        if job.config.cluster.preflight_s:
            self._check_nodes(ranks, within_s=job.config.cluster.preflight_s)
        for engine in self._engines:
            engine.run()
        self._prepare(ranks)
        ranks.start()
        while not ranks.finished:
            self._watch.look()
            self._meanwhile()
            if ranks.look():
                self._stop_asked = False  # what is started again has not heard of it
                ranks.settle()
                self._prepare(ranks)
                ranks.start()
        self._log.pass_on(self._say)

    def close(self) -> None:
        """End all processes: ranks before the engines that they hold claims of."""
        services = [service for service in (self._environment, *self._engines, self._api) if service is not None]
        ranks = [] if self._ranks is None else self._ranks.hosts
        for hosts in (ranks, [service.host for service in services if service.place is not None]):
            self._cluster.wait([host.stop.remote() for host in hosts], limit_s=_CLOSE_S)
        for host in (*ranks, *(service.host for service in services)):
            self._cluster.end(host)
        self._cluster.release()
        self._http.close()

    def _place_engines(self, ranks: Ranks) -> None:
        """Choose a place for each engine, on nodes with as little of this job as possible."""
        servers = self._job.layout.servers
        if servers is None:
            return
        bundle, hosts = engine_bundle(self._job.layout), [place.node for place in ranks.places]
        for number in range(servers.count):
            nodes = self._cluster.nodes()
            near = spread(number, hosts, [name for name, node in nodes.items() if node.gpus >= servers.gpus])
            hosts += [near] if near else []
            group = self._cluster.reserve([bundle], near=near)
            engine = Service(
                f"engine {number}",
                self._watch,
                new_host=partial(self._cluster.host, group, needs=bundle),
                task=partial(engine_task, self._job, number=number),
                moved=self._write_engines,
                restarts=self._job.config.cluster.restarts,
            )
            self._engines.append(engine)
            engine.settle(run=False)
        self._await(lambda: all(engine.place for engine in self._engines), f"a place for {servers.count} engine(s)")

    def _check_nodes(self, ranks: Ranks, *, within_s: float) -> None:
        """Look at all nodes before anything is started. Raises LachesisError where they do not fit together."""
        places = [engine.place for engine in self._engines if engine.place is not None]
        tasks = preflight_tasks(self._job, ranks.places, places, within_s=within_s)
        per_node = self._job.layout.ranks_per_node
        hosts = [host for host in ranks.hosts for _ in range(per_node)] + [engine.host for engine in self._engines]
        log = _Tail(tasks[0].log)
        calls = [host.run.remote(task) for host, task in zip(hosts, tasks, strict=True)]
        ended = self._cluster.wait(calls[:1], limit_s=within_s + _CLOSE_S)
        log.pass_on(self._say)
        if not ended:
            raise DeadlineExceeded(
                f"the preflight did not end within {within_s + _CLOSE_S:g} s (cluster.preflight_s {within_s:g})",
                remedy=f"read {tasks[0].log}",
            )
        outcome = self._cluster.outcome(calls[0])
        if isinstance(outcome, Lost) or outcome.code == _DOES_NOT_FIT:
            reason = outcome.reason if isinstance(outcome, Lost) else "the nodes do not fit together"
            raise LachesisError(
                f"nothing is started: {reason}", remedy=f"mend it; {tasks[0].log} has all that was found"
            )
        if outcome.code:
            raise failure(tasks[0].name, outcome)
        self._cluster.wait(calls, limit_s=_CLOSE_S)

    def _prepare(self, ranks: Ranks) -> None:
        """Prepare for the ranks' start: the rollout API, if it is apart from them, and their configuration."""
        job = self._job
        if job.apart and job.config.services.api is not None and self._api is None:
            if "--resume" not in self._options:
                shutil.rmtree(job.directory / "api", ignore_errors=True)
            self._api = Service(
                "the rollout API",
                self._watch,
                new_host=partial(self._cluster.host, ranks.group),
                task=self._api_task,
                restarts=job.config.services.restarts,
            )
            self._api.settle()
        if self._api is not None:
            self._await(self._api_answers, "the rollout API")
        write_atomic(job.ranks_config, dump_config(config_of_ranks(job, api=self._api_url())))

    def _api_url(self) -> str | None:
        return None if self._api is None or self._api.place is None else api_url_at(self._job, self._api.place)

    def _api_answers(self) -> bool:
        url = self._api_url()
        return url is not None and answers(self._http, f"{url}/healthz")

    def _api_task(self, place: Place) -> Task:
        from lachesis.plugins.atropos.services import api_command  # imports environments, which few runs need

        config = config_of_ranks(self._job, api=api_url_at(self._job, place))
        assert self._job.config.services.api is not None, "it is started"
        command = api_command(config, self._job.config.services.api, state_dir=self._job.directory / "api")
        return service_task(self._job, command, place, name="the rollout API", log="api.log")

    def _environment_task(self, place: Place) -> Task:
        from lachesis.plugins.atropos.services import environment_command

        chosen = self._job.config.services.environment
        assert chosen is not None, "it is started"
        command = environment_command(config_of_ranks(self._job, api=self._api_url()), chosen)
        return service_task(self._job, command, place, name=f"the environment {chosen.name}", log="env.log")

    def _tend_environment(self) -> None:
        """Start it once its engines and the API answer, and again where they are others than it knows."""
        chosen = self._job.config.services.environment
        known = [*self._engine_urls(), *filter(None, [self._api_url()])]
        if not self._job.apart or chosen is None or known == self._environment_knows or not self._engine_urls():
            return
        if not all(answers(self._http, f"{url}/health") for url in self._engine_urls()):
            return
        self._environment_knows = known
        if self._environment is not None:
            self._environment.replace()
            return
        self._environment = Service(
            f"the environment {chosen.name}",
            self._watch,
            new_host=self._cluster.host,
            task=self._environment_task,
            restarts=self._job.config.services.restarts,
            may_end=True,
        )
        self._environment.settle()

    def _engine_urls(self) -> list[str]:
        placed = [(number, engine.place) for number, engine in enumerate(self._engines) if engine.place is not None]
        return [engine_url(self._job, place, number=number) for number, place in placed]

    def _write_engines(self) -> None:
        """Write the addresses of all engines with a place; keep the old file if none has one (it may not be empty)."""
        if urls := self._engine_urls():
            write_atomic(self._job.engines_file, "".join(f"{url}\n" for url in urls))

    def _await(self, there: Callable[[], bool], what: str) -> None:
        """Do what comes up until it is there. Raises DeadlineExceeded."""
        limit_s = self._job.config.cluster.wait_s
        until = time.monotonic() + limit_s
        while not there():
            if time.monotonic() > until:
                raise DeadlineExceeded(
                    f"waited {limit_s:g} s (cluster.wait_s) for {what}",
                    remedy=f"see what Ray has with `ray status`, and the logs in {self._job.directory}",
                )
            self._watch.look()
            self._meanwhile()

    def _meanwhile(self) -> None:
        """Pass on the output of rank 0, and a request to stop; called while anything is awaited."""
        self._log.pass_on(self._say)
        self._tend_environment()
        begun = self._ranks is not None and self._ranks.begun
        if self._stop_requested() and not begun:
            raise StopRequested("the run was stopped before its first step")
        if self._stop_requested() and not self._stop_asked:
            ask(self._job.run_dir, "stop")
            self._stop_asked = True


class _Tail:
    """Lines appended to a file from now on, without errors, which are raised here, and hints how to resume."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = path.stat().st_size if path.is_file() else 0

    def pass_on(self, say: Say) -> None:
        """Say all whole lines that are new."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]
        self._read += len(whole) + bool(whole)
        for line in whole.decode(errors="replace").splitlines() if whole else []:
            if not line.startswith("error: ") and "; resume with: " not in line:
                say(line)
