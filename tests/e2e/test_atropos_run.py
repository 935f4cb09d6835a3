"""API, engine, environment and trainer, each a process: they learn, and outlive each other's deaths."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.atropos_runs import (
    BATCH,
    GROUP,
    PROBLEMS,
    Stage,
    answers,
    assert_learned,
    assert_said_what_the_atropos_trainer_says,
    stage,
    trained_ids,
    wait_for,
    write_model,
)
from tests.e2e.runs import metrics, rewards, state
from tests.long import long_but
from tests.original import RUN_API, needs_original
from tests.warm import FORKING

# The last four steps of `none` are those after its fourth restart.
STEPS = {"shared_vllm": 26, "lora_only": 18, "lora_nccl": 18, "none": 28}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("atropos") / "model")


def rise(run_dir: Path) -> float:
    """From the first steps' mean reward to the last's."""
    values = rewards(run_dir)
    return sum(values[-4:]) / 4 - sum(values[:2]) / 2


def assert_each_batch_once(job: Stage, *, steps: int) -> None:
    """Every group of every batch that the API made was trained on, and none twice."""
    ids = trained_ids(job.run_dir)
    assert len(ids) == len(set(ids)) == steps * BATCH // GROUP
    batches = {int(one.partition("-")[0]) for one in ids}
    assert batches == set(range(steps))


@pytest.mark.parametrize(
    "mode",
    long_but(
        ["shared_vllm", "lora_only", "none"],
        short=["lora_only"],
        why="test_four_processes_learn[lora_only]: another bridge, which test_engines.py runs too",
    ),
)
def test_four_processes_learn(model: Path, tmp_path: Path, mode: str):
    with stage(tmp_path, model=model, mode=mode, steps=STEPS[mode]) as job:
        job.start_api("--strict")
        if not job.restarts_engine:
            job.start_engine()
        job.start_environment()
        job.start_trainer(job.write_config())
        assert job.wait_trainer() == 0, job.log("trainer")
        assert rise(job.run_dir) >= 0.3, rewards(job.run_dir)
        assert_each_batch_once(job, steps=STEPS[mode])
        # What was trained on last is acknowledged too, as the run is over.
        assert httpx.get(f"{job.api_url}/overview", trust_env=False).json()["outstanding"] == 0


@pytest.mark.long("test_original_environment.py::test_our_trainer_learns_from_it: with an environment of our own")
def test_the_flags_of_the_atropos_trainer_do_the_same(model: Path, tmp_path: Path):
    with stage(tmp_path, model=model, mode="lora_nccl", steps=STEPS["lora_nccl"]) as job:
        job.start_api()
        job.start_engine()
        job.start_environment()
        job.start_grpo()
        assert job.wait_trainer() == 0, job.log("trainer")
        assert rise(job.run_dir) >= 0.3, rewards(job.run_dir)
        assert_said_what_the_atropos_trainer_says(job)


@pytest.mark.long("test_four_processes_learn[lora_only]: from what a teacher says in place of rewards")
def test_a_teacher_of_the_environments_teaches_without_any_reward(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of each sampled token the environment posts what a model says that knows the sums; scores only measure."""
    steps = 8
    monkeypatch.setenv("TEACHER", str(write_model(tmp_path / "teacher", reward=0.95)))
    with stage(tmp_path, model=model, mode="shared_vllm", steps=steps) as job:
        job.start_api("--strict")
        job.start_engine()
        job.start_environment(name=f"{Path(__file__).with_name('teacher_sums.py')}:TaughtSums")
        teacher = {"kind": "rollouts", "reward_weight": 0.0}
        job.start_trainer(job.write_config(algorithm={"teacher": teacher}))
        assert job.wait_trainer() == 0, job.log("trainer") + job.log("env")
        distance = [line.values["distill_kl"] for line in metrics(job.run_dir).steps]
        assert rise(job.run_dir) >= 0.3, rewards(job.run_dir)
        assert distance[-1] < 0.4 * distance[0], distance


@needs_original
@pytest.mark.timeout(900)
def test_the_original_run_api_will_do(model: Path, tmp_path: Path):
    """Environment and trainer on it, by the plain protocol."""
    steps = 12
    with stage(tmp_path, model=model, mode="lora_nccl", steps=steps) as job:
        job.start("api", "--host", "127.0.0.1", "--port", str(job.api_port), python=RUN_API)
        wait_for(lambda: answers(f"{job.api_url}/info"), "the API")
        job.start_engine()
        # In this order, because the trainer takes longest to start and an environment does not wait for ever.
        job.start_grpo()
        job.start_environment("--env.linger", "1")
        assert job.wait_trainer(timeout_s=600) == 0, job.log("trainer")
        assert "plain protocol" in job.log("trainer")
        assert_learned(job.run_dir, steps=steps)
        assert job.processes["env"].wait(300) == 0, job.log("env")
        assert "the trainer has taken its" in job.log("env")


def test_each_may_be_killed_and_no_group_is_lost_or_trained_on_twice(model: Path, tmp_path: Path):
    steps = 24
    with stage(tmp_path, model=model, mode="lora_only", steps=steps) as job:
        config = job.write_config(checkpoint={"every_steps": 3, "save_final": False})
        job.start_api("--state-dir", tmp_path / "queue")
        job.start_engine()
        job.start_environment()
        job.start_trainer(config)

        job.wait_step(3)
        job.kill("api")
        job.start_api("--state-dir", tmp_path / "queue")

        job.wait_step(7)
        job.kill("env")
        job.start_environment()

        job.wait_step(11)
        job.kill("trainer")
        job.start_trainer(config, "--resume")

        job.wait_step(16)
        job.kill("engine")
        assert job.wait_trainer() == 6, job.log("trainer")
        (said,) = [line for line in job.log("trainer").splitlines() if line.startswith("error: ")]
        assert f"the inference server at {job.engine_url} does not answer" in said or "cannot generate" in said
        assert " -> " in said

        job.start_engine()
        job.start_trainer(config, "--resume")
        assert job.wait_trainer() == 0, job.log("trainer")
        assert state(job.run_dir)["status"] == "finished"
        assert_each_batch_once(job, steps=steps)


def start_everything(job: Stage, **sections: dict[str, Any]) -> None:
    """`lachesis run`, with the embedded engine's server, and the learned problems."""
    config = job.write_config(
        engine={"kind": "embedded_server", "port": job.engine_port, "urls": None},
        services={
            "environment": {
                "name": "arithmetic",
                "args": ["--env.max_num", str(PROBLEMS), "--env.group_size", str(GROUP), "--env.wait_timeout", "60"],
            }
        },
        **sections,
    )
    text = config.read_text().replace("  urls: null\n", "")
    config.write_text(text)
    job.start("trainer", "run", config, python=(sys.executable, "-c", FORKING))


def test_one_command_runs_everything_and_revives_what_dies(model: Path, tmp_path: Path):
    steps = 24
    with stage(tmp_path, model=model, mode="lora_only", steps=steps) as job:
        start_everything(job)
        for step, words in ((4, "run-api"), (9, "env arithmetic"), (15, "lachesis serve")):
            job.wait_step(step)
            job.child("trainer", words).kill()
        below = [process for process, _ in job.below("trainer")]
        assert job.wait_trainer() == 0, job.log("trainer")
        wait_for(lambda: not any(process.is_running() for process in below), "the end of all processes")
        said = job.log("trainer")
        assert "the rollout API (pid" in said
        assert "the environment arithmetic (pid" in said
        assert said.count("was ended by SIGKILL") >= 3
        assert {"api.log", "engine.log", "env.log", "trainer.log"} <= {p.name for p in (job.run_dir / "logs").iterdir()}
        assert_each_batch_once(job, steps=steps)


@pytest.mark.long(
    "test_one_command_runs_everything_and_revives_what_dies: also supervisors and weights that are shared"
)
def test_one_command_outlives_the_engine_that_shares_its_weights_and_killed_supervisors(model: Path, tmp_path: Path):
    """Of the engine's weights only checkpoints are left."""
    steps = 12
    with stage(tmp_path, model=model, mode="shared_vllm", steps=steps) as job:
        start_everything(job, checkpoint={"every_steps": 1})
        job.wait_step(2)
        job.supervisor("trainer", "run-api").kill()
        job.wait_step(4)
        job.child("trainer", "lachesis serve").kill()
        wait_for(lambda: "with a new engine (1 of 3)" in job.log("trainer"), "the next attempt")
        job.wait_step(8)
        job.supervisor("trainer", "lachesis serve").kill()
        assert job.wait_trainer() == 0, job.log("trainer")
        said = job.log("trainer")
        assert "the rollout API" in said and "lost its supervisor" in said
        assert said.count("the run resumes from its last checkpoint") == 2
        assert state(job.run_dir)["status"] == "finished"
        assert [line.step for line in metrics(job.run_dir).steps] == list(range(1, steps + 1))


def test_one_command_stops_everything_when_it_is_asked_to(model: Path, tmp_path: Path):
    with stage(tmp_path, model=model, mode="shared_vllm", steps=10_000) as job:
        start_everything(job)
        job.wait_step(3)
        below = [process for process, _ in job.below("trainer")]
        assert len(below) >= 3
        job.processes["trainer"].send_signal(signal.SIGINT)
        assert job.wait_trainer() == 128 + signal.SIGINT
        wait_for(lambda: not any(process.is_running() for process in below), "the end of all processes")
        assert "resume with: lachesis run" in job.log("trainer")
