"""A run on Kubernetes: manifests from the template beside this module."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from lachesis.common.errors import ConfigError
from lachesis.config.load import dump_config
from lachesis.config.schema import LachesisConfig
from lachesis.plugins.cluster.layout import FINAL, Layout, of_engine, of_ranks
from lachesis.plugins.cluster.templates import job_template

JOB_TOKEN, SESSION_TOKEN = "LACHESIS_JOB_TOKEN", "LACHESIS_SESSION_TOKEN"
# How long ranks may take to end by themselves after another has failed.
_ALONE_S = 10
# Of names of objects, which become names of hosts: the suffixes of ours included.
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,48}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class KubernetesJob:
    """Options of a Kubernetes job beyond the configuration.

    Args:
        image: with lachesis in its `python`; for engines also with vLLM.
        claim: name of a PersistentVolumeClaim that all pods can write to, mounted at ``mount``.
        tokens: values of the Secret by name; None if the Secret ``secret`` exists already.
        options: of the first start, as `--resume`.
        grace_s: time for a pod to end, with its step and a checkpoint.
        restarts: how often a pod of ranks is replaced.
        preflight_s: time for the preflight on all nodes; 0 skips it. Pods start minutes apart.
    """

    image: str
    claim: str
    mount: PurePosixPath
    namespace: str | None = None
    secret: str | None = None
    tokens: Mapping[str, str] | None = None
    options: tuple[str, ...] = ()
    master_port: int = 29500
    grace_s: int = 300
    restarts: int = 3
    preflight_s: int = 600


def render_kubernetes(config: LachesisConfig, layout: Layout, job: KubernetesJob) -> str:
    """Return the manifests as YAML, in the order in which they are to be created.

    Raises:
        ConfigError: the run's name is not valid in Kubernetes, or its directory is in no pod.
    """
    name = config.run.name
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"run.name {name} names no object of Kubernetes",
            remedy="take small letters, digits and -, at most 50, with a letter first: --set run.name=NAME",
        )
    run_dir = PurePosixPath(config.run.dir) / name
    if not run_dir.is_relative_to(job.mount):
        raise ConfigError(
            f"the run directory {run_dir} is not below {job.mount}, where the volume is, and would go with its pod",
            remedy=f"set run.dir below {job.mount}, or the place of the volume by --mount",
        )
    return job_template("kubernetes.yaml.j2").render(
        name=name,
        job=job,
        layout=layout,
        servers=layout.servers,
        files=_files(config, layout),
        run_dir=str(run_dir),
        config_dir="/etc/lachesis",
        secret=job.secret or f"{name}-tokens",
        token_names=(JOB_TOKEN, SESSION_TOKEN),
        final=FINAL,
        alone_s=_ALONE_S,
    )


def _files(config: LachesisConfig, layout: Layout) -> dict[str, str]:
    """Return the configurations of the pods, by file name."""
    if layout.servers is None:
        return {"config.yaml": dump_config(config)}
    engines = (f"{config.run.name}-engine-{number}" for number in range(layout.servers.count))
    urls = [f"http://{engine}.{config.run.name}-engines:{layout.servers.port}" for engine in engines]
    return {"config.yaml": dump_config(of_ranks(config, urls)), "engine.yaml": dump_config(of_engine(config))}
