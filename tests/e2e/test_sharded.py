"""Training by several processes that torchrun starts: the numbers of one process, and an end for all if one dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lachesis.plugins.export.export import export
from lachesis.train.checkpoint import Checkpoint, CheckpointManager
from tests import warm
from tests.e2e.runs import (
    checkpoints,
    environment,
    metrics,
    run_here,
    state,
    tape,
    torchrun,
    untimed,
    weights,
    write_dying_loss,
    write_run,
)
from tests.long import long_but
from tests.ports import free_port
from tests.ranks_program import CASES, LAYOUTS
from tests.tiny import tiny_model, tiny_tokenizer
from tests.waiting import LONG_S, until

SECTIONS: dict[str, dict[str, Any]] = {
    "run": {"steps": 6},
    "data": {"eval_size": 4},
    "evaluation": {"every_steps": 3, "success_reward": 0.4},
    "batch": {"prompts_per_step": 5, "max_tokens_per_microbatch": 64},
    "optimizer": {"schedule": "constant", "warmup_steps": 2, "weight_decay": 0.01},
    "algorithm": {"beta": 0.1},
    "checkpoint": {"every_steps": 3, "save_final": True},
}
LAUNCHER = """
import os, sys
port, config = sys.argv[1:]
for rank in range(2):
    if os.fork() == 0:
        here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "TORCHELASTIC_RUN_ID": "test"}
        os.environ |= {name: str(value) for name, value in here.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        sys.argv[1:] = ["train", config]
        from lachesis.cli import main
        main()
for _ in range(2):
    os.wait()
"""
# By how often the passes of all ranks meet, which depends on the number of ranks.
PASSES = ("micro_batches", "tokens_forward")


# Of each way to share the work one; the others add an option that these have in another way.
FEW = ("full", "lora_ema", "groups_of_one", "context_rows", "expert")
OTHERS = pytest.mark.long("test_several_ranks_learn_what_one_process_learns[2 ranks]: other options of the same ways")


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        pytest.param(2, FEW, id="2 ranks"),
        pytest.param(2, [case for case in CASES if case not in FEW], id="2 ranks, the others", marks=OTHERS),
        pytest.param(4, LAYOUTS, id="4 ranks", marks=OTHERS),
    ],
)
def test_several_ranks_learn_what_one_process_learns(ranks: int, cases: Sequence[str]):
    done = torchrun(ranks, "tests.ranks_program", *cases)
    assert done.code == 0, done.err
    assert done.out.splitlines() == [f"{case}: equal over {ranks} ranks" for case in cases]


def test_what_is_outside_of_the_layers_is_gathered_once_a_pass():
    done = torchrun(2, "tests.gathers_program")
    assert done.code == 0, done.err
    assert done.out.split() == ["{True:", "5,", "False:", "3}"]


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3_moe"])
def test_a_rank_reads_its_own_rows_only(tmp_path: Path, architecture: str):
    """A Qwen2 of 128 MiB, whose peak is measured; five experts over two ranks, under an adapter."""
    large = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_key_value_heads": 4}
    model = tiny_model(architecture, **large if architecture == "qwen2" else {"num_experts": 5})
    for saved, directory in ((model, tmp_path), (tiny_model(architecture), tmp_path / "small")):
        saved.save_pretrained(directory, max_shard_size="30MB")
        tiny_tokenizer().save_pretrained(directory)
    share = sum(p.numel() for p in model.parameters()) * 4 / 2 / 2**20
    # Above its share a rank was seen to take 5 to 28 MiB, by what its allocator had left; all of the model is 64 more.
    limit = [str(share + 45)] if architecture == "qwen2" else []
    done = torchrun(2, "tests.shard_read_program", str(tmp_path), *limit)
    assert done.code == 0, done.err
    assert done.out.splitlines() == ["equal"]


def assert_close_runs(found: Path, expected: Path) -> None:
    """Rollouts and evaluations are the same, metrics and weights up to the order in which numbers are added."""
    assert completions(found) == completions(expected)
    (found_steps, found_evaluations), (steps, evaluations) = untimed(found), untimed(expected)
    assert found_evaluations == evaluations
    assert found_steps.keys() == steps.keys()
    for step, values in steps.items():
        for name in values.keys() - set(PASSES):
            assert found_steps[step][name] == pytest.approx(values[name], rel=1e-4, abs=1e-5), (step, name)
    after, expected_after = weights(found), weights(expected)
    assert after.keys() == expected_after.keys()
    for name, tensor in expected_after.items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def completions(run_dir: Path) -> dict[str, list[Any]]:
    """Who was rewarded for what; not the logprobs, whose last digits differ."""
    return {
        name: [(line["prompt"]["id"], s["text"], s["reward"]) for line in rows for s in line["samples"]]
        for name, text in tape(run_dir).items()
        for rows in [[json.loads(row) for row in text.splitlines()]]
    }


def checkpoint(run_dir: Path, step: int) -> Checkpoint:
    return CheckpointManager(run_dir / "checkpoints", keep_last=2).load(step)


def soon_s() -> float:
    """Seconds within which all ranks have ended once one of them, or what has started them, was killed.

    Two, on cores that nothing else waits for: they have things to close and to say.
    """
    return 2.0 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


# What the straight run does by itself, as parts of the user's own.
PARTS = """
from lachesis.bridges.saved import write_checkpoint

# As of a model of many gigabytes.
write_checkpoint.__kwdefaults__["shard_bytes"] = 8_000


def measured(rewards, *, group):
    total = rewards.nansum(dim=1)
    advantages = total.clone()
    for one in group.unique():
        at = group == one
        advantages[at] = (total[at] - total[at].mean()) / (total[at].std() + 1e-4)
    return advantages
"""


@pytest.mark.parametrize(
    "own",
    [
        pytest.param(False, id="asynchronous"),
        pytest.param(
            True,
            id="parts of one's own",
            marks=pytest.mark.long(
                "test_a_run_of_two_ranks_goes_on_with_three_as_that_of_one[asynchronous]: parts of a user's besides"
            ),
        ),
    ],
)
def test_a_run_of_two_ranks_goes_on_with_three_as_that_of_one(tmp_path: Path, own: bool):
    straight = run_here(write_run(tmp_path / "straight", **SECTIONS))
    # Parts that are written while the ranks train; one file, of what rank 0 has gathered.
    how = {"format": "whole"} if own else {"asynchronous": True}
    sections = SECTIONS | {"checkpoint": SECTIONS["checkpoint"] | how}
    if own:
        named = {"function": "torch.optim.AdamW"}
        sections["optimizer"] = SECTIONS["optimizer"] | named
        sections["algorithm"] = SECTIONS["algorithm"] | {"advantage": "parts.py:measured"}
    config = write_run(tmp_path / "ranks", **sections)
    (tmp_path / "ranks" / "parts.py").write_text(PARTS)
    # At first they share the tokens of each micro-batch.
    first = torchrun(
        2, "lachesis", "train", config, "--set", "run.steps=3", "--set", "distributed.context_parallel_size=2"
    )
    assert first.code == 0, first.err
    saved = tmp_path / "ranks/runs/proof/checkpoints/step_000003"
    assert sorted(path.name for path in saved.iterdir()) == [
        "manifest.json", "meta.json", *(["state.pt", "weights.safetensors"] if own else ["parts", "state.pt"])
    ]  # fmt: skip
    exported, expected = load_file(export(saved) / "model.safetensors"), checkpoint(straight.run_dir, 3).tensors
    for name, tensor in exported.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    resumed = torchrun(3, "lachesis", "train", config, "--resume")
    assert resumed.code == 0, resumed.err
    assert_close_runs(found := tmp_path / "ranks/runs/proof", straight.run_dir)
    ranks = [{name for name in line.values if name.startswith("train_time/")} for line in metrics(found).steps]
    assert [len(names) for names in ranks] == [2] * 3 + [3] * (len(ranks) - 3), "how long each rank took"
    # It was written as it was gathered, in several files if it is large; transformers loads what it would have saved.
    assert (len([*(found / "final").glob("model-*-of-*.safetensors")]) > 1) is own
    finals = [AutoModelForCausalLM.from_pretrained(run / "final") for run in (found, straight.run_dir)]
    described = [{**final.config.to_dict(), "_name_or_path": ""} for final in finals]
    assert described[0] == described[1]
    loaded, written = finals[0].state_dict(), weights(found)
    assert written and all(torch.equal(loaded[name], tensor) for name, tensor in written.items())
    assert not loaded.keys() - written.keys() - {*finals[0].all_tied_weights_keys}, "nothing is left as it was made"


@pytest.mark.parametrize(
    ("rank", "name", "forked"),
    [
        pytest.param(0, "the leader, rank 0 (process ", True, id="0"),
        pytest.param(1, "rank 1 (process ", True, id="1"),
        pytest.param(
            *(1, "rank 1 (process ", False),
            id="1, with torchrun as it is",
            marks=pytest.mark.long("test_a_rank_that_is_killed_ends_all_of_them_with_a_sentence[1]: nothing is forked"),
        ),
    ],
)
def test_a_rank_that_is_killed_ends_all_of_them_with_a_sentence(tmp_path: Path, rank: int, name: str, forked: bool):
    """The others wait for it in the midst of a backward pass then."""
    loss = write_dying_loss(tmp_path, rank=rank, at_call=4)
    config = write_run(tmp_path / "run", **SECTIONS | {"algorithm": {"loss": loss}})
    done = torchrun(2, "lachesis", "train", config, forked=forked)
    assert done.code != 0
    (error,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert name in error
    assert "ended without reporting an error" in error
    if rank > 0:
        stands = state(tmp_path / "run/runs/proof")
        assert stands["status"] == "failed"
        assert name in stands["error"]


def run_that_may_restart(directory: Path, *, killed: int) -> Path:
    """Of two ranks, one of which is killed in step 5, or none by -1."""
    loss = write_dying_loss(directory, rank=killed, at_call=9)
    config = write_run(directory, **SECTIONS | {"algorithm": {"loss": loss}})
    done = torchrun(2, "lachesis", "train", config, max_restarts=1)
    assert done.code == 0, done.err
    assert ("the run resumes from its last checkpoint" in done.err) == (killed >= 0), done.err
    if killed >= 0:  # those that are started again are once all have ended
        started = min(float(path.read_text()) for path in (directory / "times").glob("1-*"))
        # The system tells when a process was started from the second in which it was booted.
        assert abs(started - float((directory / "times/killed").read_text())) < soon_s()
    return directory / "runs/proof"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_that_may_restart(tmp_path_factory.mktemp("undisturbed"), killed=-1)


DYING_WRITER = """
import os, signal, time
from lachesis.train.distributed.sharded_checkpoint import PartsSave

write, calls = PartsSave._write, []

def dying(saving):
    calls.append(1)
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and os.environ["RANK"] == "1" and len(calls) == 2:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    write(saving)

PartsSave._write = dying

def loss(logprobs, *, ratio, advantages, **rest):
    return -ratio * advantages
"""


def test_a_rank_that_dies_while_it_writes_leaves_the_checkpoint_before(tmp_path: Path, undisturbed: Path):
    """Its parts are written while all train on; what is left of them is no checkpoint, and nobody takes it for one."""
    (tmp_path / "dying.py").write_text(DYING_WRITER)
    checkpoint = SECTIONS["checkpoint"] | {"every_steps": 2, "asynchronous": True}
    config = write_run(
        tmp_path, **SECTIONS | {"checkpoint": checkpoint, "algorithm": {"loss": f"{tmp_path / 'dying.py'}:loss"}}
    )
    done = torchrun(2, "lachesis", "train", config, max_restarts=1)
    assert done.code == 0, done.err
    assert "the run resumes from its last checkpoint" in done.err, done.err
    found = tmp_path / "runs/proof"
    assert checkpoints(found) == ["step_000004", "step_000006"]
    assert untimed(found) == untimed(undisturbed)
    for name, tensor in weights(undisturbed).items():
        assert torch.equal(weights(found)[name], tensor), name


@pytest.mark.parametrize(
    "rank",
    long_but(
        [0, 1],
        short=[0],
        why="test_what_torchrun_starts_again_goes_on_from_its_last_checkpoint[0]: another rank is killed",
    ),
)
def test_what_torchrun_starts_again_goes_on_from_its_last_checkpoint(tmp_path: Path, undisturbed: Path, rank: int):
    """Rank 0 or another is killed in step 5; the attempt after it finds a store with the keys of the one before."""
    found, expected = run_that_may_restart(tmp_path, killed=rank), undisturbed
    assert state(found)["status"] == "finished"
    assert untimed(found) == untimed(expected)
    assert completions(found) == completions(expected)
    for name, tensor in weights(expected).items():
        assert torch.equal(weights(found)[name], tensor), name


def test_ranks_end_with_what_started_them_though_it_is_killed(tmp_path: Path):
    """torchrun cannot stop them then. Here it is a small program, whose ranks are forked off it."""
    config = write_run(tmp_path, **SECTIONS | {"run": {"steps": 100_000}})
    with (tmp_path / "log").open("wb") as log:
        words = [sys.executable, "-c", LAUNCHER, str(free_port()), str(config)]
        launcher = warm.Popen(words, env=environment(), stdout=log, stderr=log)
    try:
        until(lambda: (tmp_path / "runs/proof/metrics.jsonl").exists(), (tmp_path / "log").read_text)
        ranks = psutil.Process(launcher.pid).children()
    finally:
        launcher.kill()
    killed = time.monotonic()
    assert len(ranks) == 2
    until(lambda: not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks))
    assert time.monotonic() - killed < soon_s()
    assert "has ended, so its ranks end too" in (tmp_path / "log").read_text()


HANGING_LOSS = """
import os, pathlib, time
calls = []

def loss(logprobs, *, ratio, advantages, **rest):
    calls.append(1)
    if len(calls) == 9 and os.environ["RANK"] == "1":
        pathlib.Path(__file__).with_name("reached").touch()
        time.sleep(600)
    return -ratio * advantages
"""


@pytest.mark.long("test_ranks_end_with_what_started_them_though_it_is_killed: with torchrun itself, and then --resume")
def test_torchrun_is_killed_and_the_run_goes_on_by_hand_bit_by_bit(tmp_path: Path, undisturbed: Path):
    """In step 5, while one rank hangs and the other waits for it: `--resume` goes on from the checkpoint of step 3."""
    (tmp_path / "hanging.py").write_text(HANGING_LOSS)
    config = write_run(tmp_path, **SECTIONS | {"algorithm": {"loss": f"{tmp_path / 'hanging.py'}:loss"}})
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "lachesis", "train", config]
    with (tmp_path / "log").open("wb") as log:
        launcher = subprocess.Popen([sys.executable, *words], env=environment(), stdout=log, stderr=log)
    try:
        until((tmp_path / "reached").exists, (tmp_path / "log").read_text, limit_s=3 * LONG_S)
        ranks = psutil.Process(launcher.pid).children()
    finally:
        launcher.kill()
        launcher.wait()
    killed = time.monotonic()
    assert len(ranks) == 2
    until(lambda: not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks))
    assert time.monotonic() - killed < soon_s()
    found = tmp_path / "runs/proof"
    assert checkpoints(found) == ["step_000003"]
    resumed = torchrun(2, "lachesis", "train", config, "--resume")
    assert resumed.code == 0, resumed.err
    assert untimed(found) == untimed(undisturbed)
    assert completions(found) == completions(undisturbed)
    for name, tensor in weights(undisturbed).items():
        assert torch.equal(weights(found)[name], tensor), name
