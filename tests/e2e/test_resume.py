"""A run that was stopped or killed goes on as if it had never ended: bitwise, on the CPU."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lachesis.train.checkpoint import CheckpointManager
from tests.e2e.runs import (
    checkpoints,
    command,
    metrics,
    run_here,
    state,
    tape,
    untimed,
    weights,
    write_reward,
    write_run,
)
from tests.long import long_but
from tests.warm import COMMAND

SECTIONS: dict[str, dict[str, Any]] = {
    "run": {"steps": 12},
    "data": {"eval_size": 4},
    "evaluation": {"every_steps": 5, "success_reward": 0.4},
    "batch": {"prompts_per_step": 5},  # does not divide the 12 problems: epochs end within batches
    "optimizer": {"schedule": "cosine", "warmup_steps": 3, "weight_decay": 0.01},
    "checkpoint": {"every_steps": 4, "save_final": True},
}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "full": {},
    "full, kl": {"algorithm": {"beta": 0.1}},
    "lora, kl": {"adapter": {"kind": "lora", "r": 4}, "algorithm": {"beta": 0.1}},
    "lora, kl in the reward": {
        "adapter": {"kind": "lora", "r": 4},
        "algorithm": {"beta": 0.1, "kl_placement": "reward_to_go", "kl_target": 1e-4, "kl_horizon": 200},
    },
    "lora, dropout": {"adapter": {"kind": "lora", "r": 4, "dropout": 0.3}},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "bfloat16, stochastic rounding": {
        "model": {"dtype": "bfloat16"},
        "optimizer": SECTIONS["optimizer"] | {"weight_update": "stochastic_rounding"},
    },
    "adafactor": {"optimizer": SECTIONS["optimizer"] | {"kind": "adafactor"}},
    "adamw_8bit": {"optimizer": SECTIONS["optimizer"] | {"kind": "adamw_8bit"}},
}


def write(directory: Path, variant: str = "full", **sections: dict[str, Any]) -> Path:
    return write_run(directory, **{"model": {}, **SECTIONS, **VARIANTS[variant], **sections})


def assert_equal_runs(found: Path, expected: Path) -> None:
    """Every metric, evaluation, rollout and weight."""
    found_steps, found_evaluations = untimed(found)
    steps, evaluations = untimed(expected)
    assert found_steps == steps
    assert found_evaluations == evaluations
    assert tape(found) == tape(expected)
    after, expected_after = weights(found), weights(expected)
    assert after.keys() == expected_after.keys()
    assert all(torch.equal(after[name], expected_after[name]) for name in after)


def assert_is_model_of(directory: Path, run_dir: Path, step: int) -> None:
    """A model that transformers loads with its tokenizer, has the weights of the checkpoint, and answers."""
    saved = CheckpointManager(run_dir / "checkpoints", keep_last=1).load(step).tensors
    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    own = dict(model.named_parameters())
    assert saved and all(torch.equal(own[name], tensor) for name, tensor in saved.items())
    prompt = AutoTokenizer.from_pretrained(directory)("ab", return_tensors="pt")
    generated = model.generate(**prompt, max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert generated.shape[1] > prompt["input_ids"].shape[1]


@pytest.mark.parametrize(
    "variant",
    long_but(
        VARIANTS,
        short=["full, kl", "lora, kl in the reward", "lora, dropout", "bfloat16, stochastic rounding", "adamw_8bit"],
        why="test_a_stopped_run_goes_on_exactly[full, kl]: fewer options, or another optimizer",
    ),
)
def test_a_stopped_run_goes_on_exactly(tmp_path: Path, variant: str):
    if variant == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    straight = run_here(write(tmp_path / "straight", variant))
    config = write(tmp_path / "stopped", variant)
    stopped = run_here(config, stop_after=6)
    assert not stopped.finished
    assert stopped.steps == 6
    assert state(stopped.run_dir)["status"] == "stopped"
    resumed = run_here(config, resume=True)
    assert resumed.finished
    assert state(resumed.run_dir)["status"] == "finished"
    assert_equal_runs(resumed.run_dir, straight.run_dir)


@pytest.mark.parametrize(
    "variant",
    long_but(
        ["full, kl", "lora, kl"],
        short=["lora, kl"],
        why="test_the_kl_is_to_the_original_model_also_after_a_resume[lora, kl]: of all weights",
    ),
)
def test_the_kl_is_to_the_original_model_also_after_a_resume(tmp_path: Path, variant: str):
    config = write(tmp_path, variant)
    run_here(config, stop_after=8)
    lines = metrics(run_here(config, resume=True).run_dir).steps
    divergence = [line.values["kl_reference"] for line in lines]
    assert divergence[0] == pytest.approx(0.0, abs=1e-6)
    assert min(divergence[6:]) > 1e-4, "measured to the checkpoint it would begin at 0 again"


def test_stopping_twice_changes_nothing_either(tmp_path: Path):
    straight = run_here(write(tmp_path / "straight"))
    config = write(tmp_path / "stopped")
    run_here(config, stop_after=1)
    run_here(config, stop_after=8, resume=True)
    assert_equal_runs(run_here(config, resume=True).run_dir, straight.run_dir)


def test_a_finished_run_that_is_resumed_stays_as_it_is(tmp_path: Path):
    config = write(tmp_path)
    first = run_here(config)
    steps, final = untimed(first.run_dir), weights(first.run_dir)
    again = run_here(config, resume=True)
    assert (again.finished, again.steps) == (True, 12)
    assert untimed(again.run_dir) == steps
    assert all(torch.equal(final[name], tensor) for name, tensor in weights(again.run_dir).items())


def test_a_run_can_be_resumed_with_more_steps(tmp_path: Path):
    optimizer = {"schedule": "constant", "warmup_steps": 3}
    straight = run_here(write(tmp_path / "straight", optimizer=optimizer))
    config = write(tmp_path / "longer", optimizer=optimizer)
    run_here(config, "run.steps=8")
    resumed = run_here(config, resume=True)
    assert resumed.steps == 12
    assert untimed(resumed.run_dir)[0] == untimed(straight.run_dir)[0]


def stopping_reward(directory: Path, *, signal_name: str, at_call: int) -> str:
    """The usual reward; at one call in one process it sends that process a signal. Evaluations call it too."""
    body = f"""
if call == {at_call} and os.environ.get("SEND_SIGNAL"):
    send(signal.{signal_name})
return shares
"""
    return write_reward(directory, body)


SENDING = f"import os; os.environ['SEND_SIGNAL'] = '1'; {COMMAND}"


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happened to."""
    return run_here(write(tmp_path_factory.mktemp("straight"))).run_dir


# Evaluations call the reward too: the first call is before step 1, and the seventh after step 5.
@pytest.mark.parametrize(
    ("name", "code", "call", "step"),
    [
        pytest.param("SIGTERM", 143, 8, 6, id="SIGTERM"),
        pytest.param("SIGINT", 130, 4, 3, id="SIGINT", marks=pytest.mark.long(
            "test_a_signal_saves_a_checkpoint_and_says_how_to_go_on[SIGTERM]: another signal, as in a terminal"
        )),
    ],
)  # fmt: skip
def test_a_signal_saves_a_checkpoint_and_says_how_to_go_on(
    tmp_path: Path, straight: Path, name: str, code: int, call: int, step: int
):
    directory = tmp_path / "run"
    directory.mkdir()
    config = write(directory, rewards={"functions": [stopping_reward(directory, signal_name=name, at_call=call)]})
    outcome = command("train", config, "--set", "run.name=told to stop", code=SENDING, cwd=tmp_path)
    assert outcome.code == code, outcome.err
    assert "stopping after this step, with a checkpoint" in outcome.err
    assert not outcome.errors
    hint = f"stopped by {name} after step {step}; resume with: lachesis train {config} '--set=run.name=told to stop'"
    run_dir = directory / "runs" / "told to stop"
    model = f"its last checkpoint as a model: lachesis export '{run_dir.relative_to(tmp_path)}'"
    assert outcome.out.splitlines()[-2:] == [model, f"{hint} --resume"]
    assert f"step_{step:06d}" in checkpoints(run_dir)
    assert state(run_dir)["status"] == "stopped"
    assert state(run_dir)["step"] == step
    assert (run_dir / "report.html").is_file()
    exported = command(*shlex.split(model.partition(": ")[2])[1:], cwd=tmp_path)
    assert exported.code == 0, exported.err
    assert_is_model_of(run_dir / "models" / f"step_{step:06d}", run_dir, step)

    resumed = run_here(config, "run.name=told to stop", resume=True)
    assert_equal_runs(resumed.run_dir, straight)


def test_a_second_signal_stops_at_once(tmp_path: Path):
    body = """
if call == 4 and os.environ.get("SEND_SIGNAL"):
    time.sleep(1)  # so that the main thread waits for this call: what comes just before that is noticed after it
    send(signal.SIGINT)
    time.sleep(3)  # two at the same moment are one
    send(signal.SIGINT)
    time.sleep(600)
return shares
"""
    config = write(tmp_path, rewards={"functions": [write_reward(tmp_path, body)]})
    outcome = command("train", config, code=SENDING)
    assert outcome.code == 130
    assert "Traceback" not in outcome.err
    run_dir = tmp_path / "runs" / "proof"
    assert state(run_dir)["status"] == "failed"
    assert state(run_dir)["error"].startswith("it was stopped at once by a second signal")
    assert [line.step for line in metrics(run_dir).steps] == [1, 2]


def test_kill_9_while_generating_loses_nothing_before_the_last_checkpoint(tmp_path: Path, straight: Path):
    config = write(tmp_path, rewards={"functions": [stopping_reward(tmp_path, signal_name="SIGKILL", at_call=9)]})
    assert command("train", config, code=SENDING).code == -9
    run_dir = tmp_path / "runs" / "proof"
    assert checkpoints(run_dir) == ["step_000004"]
    assert [line.step for line in metrics(run_dir).steps] == [1, 2, 3, 4, 5, 6]
    assert_equal_runs(run_here(config, resume=True).run_dir, straight)


# One in nine completions is right, and nobody learns which: groups without signal and failures do not end.
SELDOM = """
import zlib
if columns["trainer_state"].global_step >= 4 and os.environ.get("SEND_SIGNAL"):
    send(signal.SIGKILL)
return [float(zlib.crc32(bytes(ids)) % 9 == 0) for ids in columns["completion_ids"]]
"""
TOGETHER: dict[str, dict[str, dict[str, Any]]] = {
    "replay, refill, reroll, iterations": {
        "algorithm": {"num_iterations": 2},
        # The checkpoint is in the middle of the batch after which prompts are tried again for the first time.
        "pipeline": {"replay_size": 4, "refill_zero_signal": 1, "reroll_start_fraction": 0.5, "reroll_max_groups": 2},
    },
    "replay, refill, reroll, streaming, ema, sampler correction, scale by batch": {
        "adapter": {"kind": "lora", "r": 4},
        "algorithm": {
            "beta": 0.1,
            "kl_reference": "ema",
            "ref_sync_steps": 2,
            "sampler_correction": "token_truncate",
            "scale_rewards": "batch",
        },
        "pipeline": {
            "replay_size": 4,
            "refill_zero_signal": 1,
            "reroll_start_fraction": 0.25,
            "reroll_max_groups": 2,
            "streaming": True,
        },
    },
}
COUNTED = ("replayed_groups", "refilled_groups", "rerolled_groups")


@pytest.mark.parametrize(
    "features",
    long_but(
        TOGETHER,
        short=[[*TOGETHER][-1]],
        why="test_what_works_together_goes_on_exactly_after_kill_9: fewer of them, and two iterations",
    ),
)
def test_what_works_together_goes_on_exactly_after_kill_9(tmp_path: Path, features: str):
    """With streaming, as it would have without: the same batches, bit by bit."""
    pipeline = TOGETHER[features]["pipeline"]

    def written(name: str, pipeline: dict[str, Any]) -> Path:
        (tmp_path / name).mkdir()
        sections: dict[str, dict[str, Any]] = {
            "run": {"steps": 8},
            "sampling": {"num_generations": 4},
            "rewards": {"functions": [write_reward(tmp_path / name, SELDOM)]},
            "checkpoint": SECTIONS["checkpoint"] | {"every_steps": 3},  # with two iterations: between them
        }
        return write(tmp_path / name, **TOGETHER[features] | sections | {"pipeline": pipeline})

    straight = run_here(written("straight", pipeline | {"streaming": False})).run_dir
    config = written("killed", pipeline)
    assert command("train", config, code=SENDING).code == -9
    assert checkpoints(config.parent / "runs" / "proof") == ["step_000003"]
    assert_equal_runs(run_here(config, resume=True).run_dir, straight)
    soon_after = metrics(straight).steps[3:5]
    for name in COUNTED:
        assert sum(line.values[name] for line in soon_after) > 0, f"no {name}: nothing that was held mattered"


MOMENTS = {
    "before the new one is in place": ("lachesis.common.files", "_fsync_tree"),
    "before the old one is deleted": ("lachesis.train.checkpoint.CheckpointManager", "_prune"),
}
KILLED_AT_SECOND_CALL = """
import os, pkgutil, time
from lachesis.metrics.sinks.jsonl import read_metrics
owner, name = pkgutil.resolve_name({owner!r}), {name!r}
original, calls = getattr(owner, name), []
def patched(*arguments):
    calls.append(1)
    if len(calls) == 2:
        while {waits} and read_metrics({metrics!r}).steps[-1].step == 8:
            time.sleep(0.01)
        os.kill(os.getpid(), 9)
    return original(*arguments)
setattr(owner, name, patched)
"""


@pytest.mark.parametrize(
    ("moment", "asynchronous"), [*((moment, False) for moment in MOMENTS), ("before the new one is in place", True)]
)
def test_kill_9_while_saving_leaves_a_good_checkpoint(tmp_path: Path, straight: Path, moment: str, asynchronous: bool):
    owner, name = MOMENTS[moment]
    config = write(tmp_path, checkpoint=SECTIONS["checkpoint"] | {"keep_last": 1, "asynchronous": asynchronous})
    code = KILLED_AT_SECOND_CALL.format(
        owner=owner, name=name, waits=asynchronous, metrics=str(tmp_path / "runs" / "proof" / "metrics.jsonl")
    )
    assert command("train", config, code=code + COMMAND).code == -9
    done = metrics(tmp_path / "runs" / "proof").steps[-1].step
    assert (done > 8) == asynchronous, "training goes on while it is written, or does not"
    assert "step_000004" in checkpoints(tmp_path / "runs" / "proof")
    resumed = run_here(config, resume=True)
    assert_equal_runs(resumed.run_dir, straight)
    assert checkpoints(resumed.run_dir) == ["step_000012"], "what the kill left is cleaned up"
