"""OpenEnv's traces, held against the class of OpenEnv itself where it is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from lachesis.common.errors import DataError
from lachesis.common.types import Sample, VersionSpan
from lachesis.plugins.environments.openenv_traces import arrays_of
from lachesis.plugins.report.rollout_search import trace_of
from tests.paths import ROOT

OPENENV = ROOT / ".venv-agents"
# Reads a trace with the library's own checks, and writes what it read. Its packages are entered without their
# __init__, which imports a server that needs the line 1 of mcp.
THROUGH_OPENENV = """
import sys, types
for name in ("openenv", "openenv.core", "openenv.core.harness", "openenv.core.harness.capture"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [sys.argv[1] + "/" + name.replace(".", "/")]
from openenv.core.harness.training import TrainingTrace
sys.stdout.write(TrainingTrace.model_validate_json(sys.stdin.read()).model_dump_json())
"""


def turn(prompt: list[int], said: list[int], *, own: list[int] | None = None, name: str = "a") -> dict[str, Any]:
    return {
        "node_id": name,
        "prompt_token_ids": prompt,
        "completion_token_ids": said,
        "per_token_logps": [-0.1 * token for token in said],
        "loss_mask": [0] * len(prompt) + (own or [1] * len(said)),
    }


def of(*turns: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"schema_version": 1, "turns": list(turns), **fields}


def test_calls_that_continue_each_other_are_one_sample_with_the_traces_masks():
    found = arrays_of([of(turn([1, 2], [3, 4], own=[1, 0]), turn([1, 2, 3, 4, 9], [5], name="b"))])
    assert found == {
        "prompt_ids": [[1, 2]],
        "completion_ids": [[3, 4, 9, 5]],
        "logprobs": [[pytest.approx(-0.3), pytest.approx(-0.4), 0.0, pytest.approx(-0.5)]],
        "env_mask": [[1, 0, 0, 1]],
    }


@pytest.mark.parametrize(
    ("trace", "why"),
    [
        (of(turn([1, 2], [3]), turn([7, 8], [9], name="b")), "begins another conversation in turn 1"),
        (of(turn([1, 2], [3]), turn([1, 2], [4], name="b")), "begins another conversation in turn 1"),
        (of(), "has no turns"),
        (of(turn([1], [2]) | {"per_token_logps": []}), "different numbers of tokens, logprobs and mask bits in turn 0"),
        (of(turn([1], [2]) | {"loss_mask": [1, 1]}), "trains tokens of the prompt in turn 0"),
        (of(turn([1], [2]), schema_version=2), "has schema 2; only schema 1 is supported"),
        ({"turns": [{}]}, "is not a TrainingTrace"),
        ("[", "is not a TrainingTrace"),
        (7, "is not a TrainingTrace"),
    ],
)
def test_what_is_no_trace_of_one_conversation_is_refused(trace: Any, why: str):
    with pytest.raises(DataError, match=why) as error:
        arrays_of([of(turn([1], [2])), trace])
    assert "traces[1]" in str(error.value)


def sample() -> Sample:
    return Sample((1, 2), (3, 4, 9, 5), (-0.5, -1.0, 0.0, -2.0), "stop", VersionSpan(0, 0), mask=(1, 1, 0, 1))


def test_a_sample_is_written_with_a_turn_for_each_stretch_that_was_sampled_and_read_again():
    trace = trace_of(sample(), name="3:0:1")
    assert [(one["prompt_token_ids"], one["completion_token_ids"]) for one in trace["turns"]] == [
        ([1, 2], [3, 4]), ([1, 2, 3, 4, 9], [5]),
    ]  # fmt: skip
    for given in (trace, json.dumps(trace)):
        found = arrays_of([given])
        assert (tuple(found["completion_ids"][0]), tuple(found["env_mask"][0])) == (
            sample().completion_ids, sample().mask,
        )  # fmt: skip
        assert tuple(found["logprobs"][0]) == sample().logprobs


@pytest.mark.skipif(not (OPENENV / "openenv").is_dir(), reason="`make agents` installs OpenEnv")
def test_openenv_itself_takes_what_is_written_and_writes_what_is_read():
    trace = trace_of(sample(), name="3:0:1")
    command = [sys.executable, "-c", THROUGH_OPENENV, str(OPENENV)]
    ended = subprocess.run(command, input=json.dumps(trace), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert arrays_of([ended.stdout]) == arrays_of([trace])
    broken = json.dumps(trace | {"turns": [trace["turns"][0] | {"loss_mask": [0]}]})
    assert subprocess.run(command, input=broken, capture_output=True, text=True, timeout=300).returncode != 0
