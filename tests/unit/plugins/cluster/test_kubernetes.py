"""The manifests against the published schema; what their pods run is tested in tests/processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import kubernetes_validate
import pytest
import yaml

from lachesis.common.errors import ConfigError
from lachesis.config.load import load_config
from lachesis.plugins.cluster.kubernetes import KubernetesJob, render_kubernetes
from lachesis.plugins.cluster.layout import Machines, derive_layout
from tests.unit.plugins.cluster.test_layout import APART, CPU, config

TOKENS = {"LACHESIS_JOB_TOKEN": "j", "LACHESIS_SESSION_TOKEN": "s"}
RUN = {"run": {"steps": 2, "name": "math-8b", "dir": "/shared/runs"}}
# The first in which a Job has all that ours asks for, and the newest of the schemas.
VERSIONS = ("1.29", "1.33")


def rendered(sections: dict[str, Any], machines: Machines, **options: Any) -> list[dict[str, Any]]:
    found = config(**RUN | sections)
    given = {"image": "registry/lachesis:1", "claim": "data", "mount": PurePosixPath("/shared"), "tokens": TOKENS}
    job = KubernetesJob(**given | options)
    return list(yaml.safe_load_all(render_kubernetes(found, derive_layout(found, machines), job)))


def kinds(objects: list[dict[str, Any]]) -> list[str]:
    return [f"{found['kind']} {found['metadata']['name']}" for found in objects]


@pytest.mark.parametrize(
    ("sections", "machines", "options"),
    [
        ({}, Machines(2, 8), {"namespace": "rl"}),
        (APART, Machines(4, 8), {}),
        (CPU, Machines(1), {"options": ("--resume",)}),
    ],
)
def test_they_are_what_the_api_takes(sections: dict[str, Any], machines: Machines, options: dict[str, Any]):
    for found in rendered(sections, machines, **options):
        assert found["metadata"].get("namespace") == options.get("namespace")
        for version in VERSIONS:
            kubernetes_validate.validate(found, version, strict=True)
    broken = rendered(sections, machines)[-1]
    broken["spec"]["completionMod"] = "Indexed"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[0], strict=True)


def test_options_are_read_as_texts():
    (job,) = [
        one
        for one in rendered(CPU, Machines(1), image="r/i: {x}", claim="yes", options=("--resume",))
        if one["kind"] == "Job"
    ]
    spec = job["spec"]["template"]["spec"]
    assert spec["containers"][0]["image"] == "r/i: {x}"
    assert spec["volumes"][1]["persistentVolumeClaim"] == {"claimName": "yes"}
    assert spec["containers"][0]["command"][-2:] == ["ranks", "--resume"]


def test_which_objects_there_are():
    engines = ["Service math-8b-engines", "StatefulSet math-8b-engine"]
    ranks = ["Service math-8b-ranks", "Job math-8b-ranks"]
    assert kinds(rendered(APART, Machines(4, 8))) == [
        "Secret math-8b-tokens", "ConfigMap math-8b-config", *engines, *ranks
    ]  # fmt: skip
    own = rendered({}, Machines(2, 8), tokens=None, secret="ours")
    assert kinds(own) == ["ConfigMap math-8b-config", *ranks]
    sources = [one["valueFrom"] for one in environment_of(own[-1]) if "valueFrom" in one]
    assert {one["secretKeyRef"]["name"] for one in sources if "secretKeyRef" in one} == {"ours"}


def environment_of(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    return manifest["spec"]["template"]["spec"]["containers"][0]["env"]


def selected(objects: list[dict[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    """Services with the workloads whose pods they find."""
    pods = {one["metadata"]["name"]: one["spec"]["template"] for one in objects if "template" in one.get("spec", {})}
    for service in objects:
        if service["kind"] == "Service":
            wanted = service["spec"]["selector"].items()
            found = [name for name, pod in pods.items() if wanted <= pod["metadata"]["labels"].items()]
            yield service["metadata"]["name"], found


def test_the_services_find_their_pods_and_the_configurations_are_read(tmp_path: Path):
    objects = rendered(APART, Machines(4, 8))
    assert dict(selected(objects)) == {"math-8b-engines": ["math-8b-engine"], "math-8b-ranks": ["math-8b-ranks"]}
    (files,) = [found["data"] for found in objects if found["kind"] == "ConfigMap"]
    engines = {}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        engines[name] = load_config(tmp_path / name).config.engine
    assert engines["config.yaml"].urls == [f"http://math-8b-engine-{n}.math-8b-engines:9001" for n in range(3)]
    own = engines["engine.yaml"]
    assert (own.host, own.data_parallel_size, own.tensor_parallel_size, own.devices) == ("0.0.0.0", 1, 4, "0,1,2,3")
    (pod,) = [found["spec"] for found in objects if found["kind"] == "StatefulSet"]
    assert pod["replicas"] == 3
    assert pod["template"]["spec"]["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 4}}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"run": {"steps": 2, "name": "Math_8B", "dir": "/shared"}}, "names no object of Kubernetes"),
        ({"run": {"steps": 2, "name": "math", "dir": "/home/me"}}, "would go with its pod"),
    ],
)
def test_what_kubernetes_could_not_keep_is_refused(sections: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        rendered(sections, Machines(2, 8))
