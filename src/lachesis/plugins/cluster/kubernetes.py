"""A run on Kubernetes: manifests as YAML text, from plain objects of the API.

An indexed Job has the ranks, a pod for each node; a StatefulSet the inference servers, a pod for each. Services name
them. Or KubeRay makes a Ray cluster of pods for the run, which places all of it: a RayJob.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from lachesis.common.errors import ConfigError
from lachesis.config.load import dump_config
from lachesis.config.schema import LachesisConfig
from lachesis.plugins.cluster.layout import FINAL, Layout, NodeServers, of_engine, of_ranks

JOB_TOKEN, SESSION_TOKEN = "LACHESIS_JOB_TOKEN", "LACHESIS_SESSION_TOKEN"
_CONFIG_DIR = PurePosixPath("/etc/lachesis")
_LABEL = "app.kubernetes.io/instance"
# How long ranks may take to end by themselves after another has failed.
_ALONE_S = 10
# Of names of objects, which become names of hosts: the suffixes of ours included.
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,48}[a-z0-9])?")

# The arguments are those of the first start. A pod that comes after another of the same Job goes on from the last
# checkpoint; where there is none yet, from the start. An older run in its place is none of the Job's. SIGTERM is
# passed on, with which rank 0 saves a checkpoint.
_RANKS = """\
run_dir={run_dir}
begun=$run_dir-kubernetes/$JOB_UID
if [[ ! -e $begun ]]; then
    mkdir -p "$run_dir-kubernetes"
    : >"$begun"
elif [[ $run_dir/state.json -nt $begun ]]; then
    if compgen -G "$run_dir/checkpoints/step_[0-9]*[0-9]" >/dev/null; then set -- --resume; else set -- --overwrite; fi
fi
pids=()
stopping=''
trap 'stopping=1; kill -TERM "${{pids[@]}}" 2>/dev/null' TERM
each() {{  # a process for each rank of this pod
    pids=()
    for ((local = 0; local < LOCAL_WORLD_SIZE; local++)); do
        RANK=$((GROUP_RANK * LOCAL_WORLD_SIZE + local)) LOCAL_RANK=$local python -m lachesis "$@" &
        pids+=($!)
    done
}}
if (({preflight_s} > 0)); then
    each cluster preflight {config} --within {preflight_s}
    for pid in "${{pids[@]}}"; do wait "$pid" || exit $?; done
fi
each {command} {config} "$@"
code=0
while ((code == 0)) && [[ $(jobs -p) ]]; do
    wait -n || code=$?
done
if [[ $stopping ]]; then
    wait
elif ((code != 0)); then  # those that the first to fail has left behind end by themselves, or are ended
    sleep {alone_s}
    kill -KILL "${{pids[@]}}" 2>/dev/null
fi
exit "$code"
"""


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
        ray: Ray places the run, on a cluster that KubeRay makes; ``secret`` and ``tokens`` are unused.
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
    ray: bool = False


def render_kubernetes(config: LachesisConfig, layout: Layout, job: KubernetesJob) -> str:
    """Return the manifests, in the order in which they are to be created.

    Raises:
        ConfigError: the run's name is not valid in Kubernetes, or its directory is in no pod.
    """
    found = manifests(config, layout, job)
    return yaml.dump_all(found, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def manifests(config: LachesisConfig, layout: Layout, job: KubernetesJob) -> list[dict[str, Any]]:
    """Return the manifests as objects of the API. Raises as :func:`render_kubernetes`."""
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
    if job.ray:
        return [
            _config_map({"config.yaml": dump_config(_by_ray(config, layout, job))}, name, job),
            _ray_job(name, layout, job),
        ]
    files = {"config.yaml": dump_config(config)}
    if layout.servers is not None:
        count, port = layout.servers.count, layout.servers.port
        urls = [f"http://{name}-engine-{number}.{name}-engines:{port}" for number in range(count)]
        files = {"config.yaml": dump_config(of_ranks(config, urls)), "engine.yaml": dump_config(of_engine(config))}
    found = [
        _config_map(files, name, job),
        _service(f"{name}-ranks", job, role="ranks", port=job.master_port),
        _ranks(config, layout, job, run_dir=run_dir),
    ]
    if layout.servers is not None:
        found[1:1] = [
            _service(f"{name}-engines", job, role="engines", port=layout.servers.port),
            _engines(name, layout.servers, job),
        ]
    if job.tokens is not None:
        found.insert(0, _object("v1", "Secret", _secret(name, job), job, type="Opaque", stringData=dict(job.tokens)))
    return found


def _by_ray(config: LachesisConfig, layout: Layout, job: KubernetesJob) -> LachesisConfig:
    """Return the configuration of the run on these nodes of a Ray cluster."""
    sizes = {"gpus_per_node": layout.gpus} if layout.gpus else {"ranks_per_node": layout.ranks_per_node}
    more = {"restarts": job.restarts, "preflight_s": float(job.preflight_s)}
    changes = {"kind": "ray", "nodes": layout.nodes, **sizes, **more}
    return config.model_copy(update={"cluster": config.cluster.model_copy(update=changes)})


def _ray_job(name: str, layout: Layout, job: KubernetesJob) -> dict[str, Any]:
    """Return a Ray cluster with a pod for each node, which KubeRay replaces, and a head that only places and watches.

    KubeRay gives the pods their commands. It could also restart the whole job, but would do so after any failure.
    """
    command = ["python", "-m", "lachesis", "run", str(_CONFIG_DIR / "config.yaml"), *job.options]
    workers = {
        "groupName": "nodes",
        "replicas": layout.nodes,
        "minReplicas": layout.nodes,
        "maxReplicas": layout.nodes,
        "rayStartParams": {},
        "template": _ray_pod(name, job, role="nodes", gpus=layout.gpus),
    }
    head = {"rayStartParams": {"num-cpus": "0"}, "template": _ray_pod(name, job, role="head", gpus=0)}
    return _object(
        "ray.io/v1",
        "RayJob",
        name,
        job,
        spec={
            "entrypoint": shlex.join(command),
            "backoffLimit": 0,
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": {
                "authOptions": {"mode": "token"},
                "headGroupSpec": head,
                "workerGroupSpecs": [workers],
            },
        },
    )


def _ray_pod(name: str, job: KubernetesJob, *, role: str, gpus: int) -> dict[str, Any]:
    return _template(name, job, role=role, container=_container(job, role=f"ray-{role}", gpus=gpus))


def _ranks(config: LachesisConfig, layout: Layout, job: KubernetesJob, *, run_dir: PurePosixPath) -> dict[str, Any]:
    """Return the Job with a pod for each node that trains; all are needed, so a pod that fails for good ends it."""
    name = f"{config.run.name}-ranks"
    environment = [
        {"name": "MASTER_ADDR", "value": f"{name}-0.{name}"},
        {"name": "MASTER_PORT", "value": str(job.master_port)},
        {"name": "WORLD_SIZE", "value": str(layout.ranks)},
        {"name": "LOCAL_WORLD_SIZE", "value": str(layout.ranks_per_node)},
        _field("GROUP_RANK", "metadata.annotations['batch.kubernetes.io/job-completion-index']"),
        _field("JOB_UID", "metadata.labels['batch.kubernetes.io/controller-uid']"),
    ]
    script = _RANKS.format(
        run_dir=shlex.quote(str(run_dir)),
        command=layout.command,
        config=_CONFIG_DIR / "config.yaml",
        alone_s=_ALONE_S,
        preflight_s=job.preflight_s,
    )
    pod = _pod(config.run.name, job, role="ranks", script=script, gpus=layout.gpus, environment=environment)
    pod["spec"] |= {"subdomain": name, "restartPolicy": "Never"}
    final = {"containerName": "ranks", "operator": "In", "values": FINAL}
    return _object(
        "batch/v1",
        "Job",
        name,
        job,
        spec={
            "completionMode": "Indexed",
            "completions": layout.rank_nodes,
            "parallelism": layout.rank_nodes,
            "backoffLimitPerIndex": job.restarts,
            "maxFailedIndexes": 0,
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    {"action": "FailJob", "onExitCodes": final},
                ]
            },
            "template": pod,
        },
    )


def _engines(name: str, servers: NodeServers, job: KubernetesJob) -> dict[str, Any]:
    script = (
        'export LACHESIS_ALLOWED_HOSTS="$HOSTNAME.$SERVICE"\n'
        f"exec python -m lachesis vllm-serve {_CONFIG_DIR / 'engine.yaml'}\n"
    )
    environment = [{"name": "SERVICE", "value": f"{name}-engines"}]
    pod = _pod(name, job, role="engines", script=script, gpus=servers.gpus, environment=environment)
    container = pod["spec"]["containers"][0]
    container["ports"] = [{"name": "http", "containerPort": servers.port}]
    container["readinessProbe"] = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 10}
    return _object(
        "apps/v1",
        "StatefulSet",
        f"{name}-engine",
        job,
        spec={
            "serviceName": f"{name}-engines",
            "replicas": servers.count,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": pod["metadata"]["labels"]},
            "template": pod,
        },
    )


def _pod(
    name: str, job: KubernetesJob, *, role: str, script: str, gpus: int, environment: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return a pod whose container runs a script, with the tokens of the run."""
    tokens = [
        {"name": token, "valueFrom": {"secretKeyRef": {"name": _secret(name, job), "key": token}}}
        for token in (JOB_TOKEN, SESSION_TOKEN)
    ]
    command = ["bash", "-c", script, role, *(job.options if role == "ranks" else ())]
    container = _container(job, role=role, gpus=gpus) | {"command": command, "env": [*environment, *tokens]}
    return _template(name, job, role=role, container=container)


def _container(job: KubernetesJob, *, role: str, gpus: int) -> dict[str, Any]:
    """NCCL and vLLM want more shared memory than the 64 MiB that one has by itself, and so does Ray."""
    container: dict[str, Any] = {
        "name": role,
        "image": job.image,
        "workingDir": str(job.mount),
        "volumeMounts": [
            {"name": "config", "mountPath": str(_CONFIG_DIR)},
            {"name": "shared", "mountPath": str(job.mount)},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }
    return container | ({"resources": {"limits": {"nvidia.com/gpu": gpus}}} if gpus else {})


def _template(name: str, job: KubernetesJob, *, role: str, container: dict[str, Any]) -> dict[str, Any]:
    """Return a pod with one container."""
    volumes = [
        {"name": "config", "configMap": {"name": f"{name}-config"}},
        {"name": "shared", "persistentVolumeClaim": {"claimName": job.claim}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
    ]
    return {
        "metadata": {"labels": {_LABEL: name, "app.kubernetes.io/component": role}},
        "spec": {"terminationGracePeriodSeconds": job.grace_s, "containers": [container], "volumes": volumes},
    }


def _config_map(files: Mapping[str, str], name: str, job: KubernetesJob) -> dict[str, Any]:
    return _object("v1", "ConfigMap", f"{name}-config", job, data=dict(files))


def _service(name: str, job: KubernetesJob, *, role: str, port: int) -> dict[str, Any]:
    """Return a service that names each pod, even before it is ready, as ranks meet and servers are awaited then."""
    selector = {_LABEL: name.removesuffix(f"-{role}"), "app.kubernetes.io/component": role}
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": selector,
        "ports": [{"name": role, "port": port}],
    }
    return _object("v1", "Service", name, job, spec=spec)


def _object(version: str, kind: str, name: str, job: KubernetesJob, **rest: Any) -> dict[str, Any]:
    namespace = {} if job.namespace is None else {"namespace": job.namespace}
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, **namespace}, **rest}


def _secret(name: str, job: KubernetesJob) -> str:
    return job.secret or f"{name}-tokens"


def _field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


class _Dumper(yaml.SafeDumper):
    """Text of several lines is written as lines; and no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _lines(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _lines)
