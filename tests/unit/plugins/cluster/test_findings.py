"""What is said of nodes that do not fit: each finding names its node and what to do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lachesis.plugins.cluster.findings import Facts, Needs, NodeOutcome, judge

VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "vllm": "0.32.0"}
FACTS = [
    Facts(0, 0, "a", False, VERSIONS, 2, 10**12),
    Facts(1, 1, "a", False, VERSIONS, 2, 10**12),
    Facts(2, 0, "b", True, VERSIONS, 2, 10**12),
]
OUTCOMES = [NodeOutcome(rank, 100.0 + rank / 100, True) for rank in range(3)]
NEEDS = Needs(("a", "a", "b"), 2, False, ("vllm",), 10**11, "engines load weights from it", 15.0)


def said(facts: dict[int, Facts] | None = None, outcomes: dict[int, NodeOutcome] | None = None, needs: Needs = NEEDS):
    """The findings where some processes say something else."""
    found = judge(
        [(facts or {}).get(one.rank, one) for one in FACTS],
        [(outcomes or {}).get(one.rank, one) for one in OUTCOMES],
        needs,
    )
    return [(finding.level, finding.message) for finding in found]


def test_nodes_that_fit_have_no_finding():
    assert said() == []
    lacks = VERSIONS | {"vllm": None}
    assert said({0: replace(FACTS[0], versions=lacks), 1: replace(FACTS[1], versions=lacks)}) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"versions": VERSIONS | {"torch": "2.11.0"}}, "b: torch is 2.11.0, but 2.13.0 on a: install the same on both"),
        ({"versions": VERSIONS | {"vllm": None}}, "b: vllm is not installed, but the engine needs it there: install "
         "it"),
        ({"taken": ["port 9001 is taken by pid 7"]}, "b: port 9001 is taken by pid 7: stop it, or choose another port"),
        ({"unwritable": "Permission denied"}, "b: the run directory cannot be written (Permission denied): choose "
         "another run.dir"),
    ],
)  # fmt: skip
def test_what_a_node_says_of_itself(changes: dict, expected: str):
    assert said({2: replace(FACTS[2], **changes)}) == [("problem", expected)]


@pytest.mark.parametrize(
    ("changes", "level", "expected"),
    [
        ({"unreachable": ["b:9001"]}, "problem", "a: does not reach b:9001, where an engine will be: check the "
         "firewall between them"),
        ({"sees_run_dir": False}, "problem", "a: does not see files that a writes to the run directory, and engines "
         "load weights from it: put run.dir on a shared disk"),
        ({"failure": "timed out"}, "problem", "a: the all-reduce over 2 ranks failed: timed out: check that the "
         "nodes' network connects them (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)"),
        ({"clock": 88.0}, "warning", "a: its clock is 12 s behind that of a: check its time service, or logs cannot "
         "be compared"),
    ],
)  # fmt: skip
def test_what_a_node_finds_out_with_the_others(changes: dict, level: str, expected: str):
    assert said(outcomes={1: replace(OUTCOMES[1], **changes)}) == [(level, expected)]


def test_gpus_and_disk():
    few = {1: replace(FACTS[1], gpus=1)}
    assert said(few) == [
        ("problem", "a: torch sees 1 GPU(s), but a rank needs number 1: ask for more GPUs, or check its driver")
    ]
    assert said(few, needs=replace(NEEDS, on_cpu=True)) == []
    assert said(needs=replace(NEEDS, needed_bytes=2 * 10**12)) == [
        (
            "problem",
            "a: 1000.0 GB are free in run.dir, but the run needs 2000.0 GB: free some space, or lower "
            "checkpoint.keep_last",
        )
    ]
    unseen = {1: replace(OUTCOMES[1], sees_run_dir=False)}
    assert said(outcomes=unseen, needs=replace(NEEDS, shared="")) == []
    blind = {rank: replace(one, sees_run_dir=False) for rank, one in enumerate(OUTCOMES)}
    full = {0: replace(FACTS[0], unwritable="No space left on device")}
    assert said(full, blind) == [
        ("problem", "a: the run directory cannot be written (No space left on device): choose another run.dir")
    ]


def test_those_that_have_not_come_are_named():
    came = [("problem", "b: process 2 connected, but did not answer after that: see its log")]
    absent = [("problem", "b: process 2 did not connect within 15 s: see its log, and check that it can reach rank 0")]
    for facts, expected in ((FACTS, came), (FACTS[:2], absent)):
        found = judge(facts, OUTCOMES[:2], NEEDS)
        assert [(finding.level, finding.message) for finding in found] == expected
