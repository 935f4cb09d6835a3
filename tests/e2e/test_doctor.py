"""`lachesis doctor CONFIG` over a real server of vLLM: what is tried of a configuration, line by line."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.contracts.servers import python_path
from tests.contracts.vllm_server import ENVIRONMENT, entry_point, needs_vllm
from tests.e2e.runs import Outcome, environment, write_run
from tests.ports import free_port
from tests.warm import FORKING

LORA: dict[str, Any] = {"adapter": {"kind": "lora", "r": 4}}
# A line of the answer: how it was, what was looked at, and the rest.
_LINE = re.compile(r"(?P<mark>ok|n/a|fail) +(?P<subject>.+?)  +(?P<message>.+)")
_BRIDGE = (
    r"{kind} to a vLLM server: weights of a step arrived and are proved (?P<transfer>[\d.]+) s after it; "
    r"(?P<all>[\d.]+) s in all \(limits: start 600 s, transfer 30 s\)"
)


def write(directory: Path, *, bridge: dict[str, Any], device: str, dtype: str = "float32", **engine: Any) -> Path:
    """The configuration of a run over vLLM at a free port."""
    return write_run(
        directory,
        engine={"kind": "vllm", "port": free_port(), "max_model_len": 32, "enforce_eager": True} | engine,
        bridge=bridge,
        model={"device": device, "dtype": dtype},
        **(LORA if bridge["kind"].startswith("lora") else {}),
    )


def doctor(config: Path, **variables: str) -> Outcome:
    """`lachesis doctor CONFIG` as a process of its own, which finds vLLM's plugin; no model is trained."""
    directory = config.parent
    paths = {"PYTHONPATH": python_path(entry_point(directory / "plugin")), "LACHESIS_SESSION_DIR": str(directory / "s")}
    words = [sys.executable, "-c", FORKING, "doctor", str(config), "--no-proof"]
    done = warm.run(words, env=environment(**variables, **paths), timeout=600)
    return Outcome(done.returncode, done.stdout, done.stderr)


def lines(done: Outcome) -> dict[str, tuple[str, str]]:
    """Mark and message of each line, by its subject."""
    found = [line for line in map(_LINE.fullmatch, map(str.rstrip, done.out.splitlines())) if line is not None]
    return {line["subject"]: (line["mark"], line["message"]) for line in found}


def check(done: Outcome, *, config: Path, kind: str) -> dict[str, float]:
    """All that was tried passed; returns the seconds that it took.

    Args:
        done: the answer.
        config: that was tried.
        kind: of its bridge.
    """
    assert done.code == 0, f"{done.out}\n{done.err}"
    said = lines(done)
    assert not [subject for subject, (mark, _) in said.items() if mark == "fail"]
    assert said[str(config)] == ("ok", "valid")
    assert said["servers"] == ("n/a", "none is to run already")
    (port,) = [subject for subject in said if subject.startswith("port ")]
    assert said[port] == ("ok", "free for the engine that a run starts")
    assert ("rendezvous" in said) == (kind == "broadcast"), "the side channel by which weights travel"
    bridge = re.fullmatch(_BRIDGE.format(kind=kind), said["bridge"][1])
    assert said["bridge"][0] == "ok" and bridge is not None, said["bridge"]
    return {"transfer": float(bridge["transfer"]), "bridge": float(bridge["all"])}


@needs_vllm
@pytest.mark.timeout(600)
def test_what_a_run_over_vllm_needs_is_tried(tmp_path: Path):
    """With one bridge, as vLLM's start takes most of a minute: tests/processes/test_checkup.py has more of them."""
    config = write(tmp_path, bridge={"kind": "broadcast"}, device="cpu")
    done = doctor(config, **ENVIRONMENT)
    check(done, config=config, kind="broadcast")
