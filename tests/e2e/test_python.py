"""Training from Python: the page's own code, the example's loop, and a run in the background."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import subprocess
import sys
import threading
from ast import PyCF_ALLOW_TOP_LEVEL_AWAIT
from pathlib import Path
from statistics import fmean
from typing import Any

import datasets
import pandas
import pytest

import lachesis
from lachesis.common.errors import DataError
from lachesis.metrics.sinks.tape import read_groups
from lachesis.plugins.checks.doctor import write_proof
from lachesis.run.requests import ask, is_asked
from tests import warm
from tests.e2e.runs import environment
from tests.e2e.test_quickstart import load
from tests.paths import EXAMPLES, ROOT
from tests.waiting import LONG_S, until

ROWS = [{"prompt": f"{a}{b}", "answer": "aaaaa"} for a in "abcd" for b in "abcd"]


def share_of_a(completions: list[Any], **columns: Any) -> list[float]:
    texts = [completion[0]["content"] for completion in completions]
    return [text.count("a") / max(len(text), 1) for text in texts]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to work in, with a model in it."""
    write_proof(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "model"


@pytest.fixture
def keys(model: Path) -> dict[str, Any]:
    """A run of three short steps."""
    return {
        "model": model,
        "data": ROWS,
        "rewards": [share_of_a],
        "run": {"steps": 3},
        "sampling": {"num_generations": 4, "max_completion_length": 6},
        "batch": {"prompts_per_step": 8},
        "optimizer": {"learning_rate": 3e-3},
        "checkpoint": {"save_final": False},
    }


def test_the_code_of_the_page_runs(model: Path):
    page = (ROOT / "docs" / "python.md").read_text()
    names: dict[str, Any] = {}
    for code in re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL):
        exec(compile(code.replace("Qwen/Qwen2.5-0.5B-Instruct", str(model)), "docs/python.md", "exec"), names)
    assert names["run"].directory == Path("runs/first").absolute()
    assert len(names["run"].metrics) == 3
    assert (model.parent / "after-one-step" / "config.json").is_file()
    assert names["now"].shape == (len(names["groups"][0].samples[0].completion_ids),)


def test_the_loop_of_the_example_learns(model: Path):
    assert len((EXAMPLES / "loop.py").read_text().splitlines()) <= 40
    means = load("loop", EXAMPLES).train(str(model), ROWS, steps=12, rate=5e-3)
    assert len(means) == 12
    assert fmean(means[-3:]) - fmean(means[:3]) > 0.15
    assert (model.parent / "loop-model" / "model.safetensors").is_file()


def test_where_an_event_loop_runs(keys: dict[str, Any]):
    async def cell() -> lachesis.Run:
        ticks = 0

        async def others() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.001)
                ticks += 1

        beside = asyncio.ensure_future(others())
        data = {"path": datasets.Dataset.from_list(ROWS), "eval_path": ROWS[:4]}
        run = lachesis.train(**keys | {"data": data})
        summary = await run
        beside.cancel()
        assert summary.finished
        assert ticks > 3, "the loop went on meanwhile"
        return run

    run = asyncio.run(cell())
    assert run.done
    assert run.error is None
    assert run.status.state == "finished"
    assert list(run.metrics["step"]) == [0, 1, 2, 3]
    assert list(run.metrics["evaluation/problems"].dropna()) == [4, 4]
    kept = {path.name: read_groups(path) for path in (run.directory / "evaluations").iterdir()}
    assert {name: len(groups) for name, groups in kept.items()} == {"step_000000.jsonl": 4, "step_000003.jsonl": 4}
    assert "Held-out problems" in run.report.read_text()
    assert set(run.rollouts) >= {"step", "prompt", "completion", "reward", "advantage", "reward/share_of_a"}
    assert len(run.rollouts) == 3 * 8 * 4
    assert run.report.is_file()
    with pytest.raises(lachesis.DataError, match="save_final is off"):
        _ = run.model


def test_one_that_is_stopped_is_gone_on_with(keys: dict[str, Any]):
    asked = threading.Event()

    def slow(completions: list[Any], **columns: Any) -> list[float]:
        asked.set()
        return share_of_a(completions)

    frame = pandas.DataFrame(ROWS)
    keys |= {"data": frame, "rewards": slow, "run": {"steps": 500}, "checkpoint": {"every_steps": 500}}
    run = lachesis.train(**keys)
    assert asked.wait(LONG_S)
    with pytest.raises(lachesis.ConfigError, match="this process is already training a run"):
        lachesis.train(**keys | {"run": {"name": "other", "steps": 1}})
    with pytest.raises(lachesis.DeadlineExceeded, match=r"has not ended after 0\.01 s"):
        run.wait(0.01)
    run.stop()
    stopped = run.wait(LONG_S)
    assert not stopped.finished
    assert repr(run).endswith(f"stopped, step {stopped.steps} of 500>")
    with pytest.raises(
        lachesis.ConfigError, match=r"holds a run already .* resume=True, start over with overwrite=True"
    ):
        lachesis.train(**keys)
    again = lachesis.load(run.directory, data=frame, rewards=slow, run={"steps": stopped.steps + 2})
    assert again.start(resume=True).wait(LONG_S).steps == stopped.steps + 2


def test_its_model_is_asked_while_it_goes_on(keys: dict[str, Any]):
    keys["run"] = {"steps": 1000}
    run = lachesis.train(**keys)
    with pytest.raises(DataError, match=r"prompts\[0\]"):
        run.sample("")
    assert len(run.sample("ab", n=3, max_tokens=4, temperature=0.5, timeout_s=LONG_S)) == 3
    run.stop()
    assert not run.wait().finished
    asked: dict[str, Any] = {"n": 2, "max_tokens": 4, "temperature": 0.0}
    after = run.sample("ab", **asked)
    assert after == lachesis.load(run.directory, **keys).sample("ab", **asked), "by the model of its checkpoint"
    with lachesis.parts(model=run.export("exported")) as parts:
        assert [sample.text for sample in parts.sample(["ab"], **asked)[0].samples] == after


def test_it_ends_when_its_evaluations_get_no_better_and_has_kept_the_best(keys: dict[str, Any]):
    """The held-out reward rises once, after the second step, and never again."""

    def once(completions: list[Any], trainer_state: Any, **columns: Any) -> list[float]:
        return [float(trainer_state.global_step >= 2)] * len(completions)

    keys |= {"rewards": [once], "run": {"steps": 100}, "data": {"path": ROWS, "eval_size": 4}}
    keys["evaluation"] = {"every_steps": 1, "patience": 2}
    keys["checkpoint"] = {"keep_best": True}
    summary = lachesis.train(**keys).wait()
    assert summary.finished and 3 <= summary.steps <= 6
    best = json.loads((summary.run_dir / "best" / "lachesis.json").read_text())["step"]
    assert best == summary.steps - 2 and (summary.run_dir / "final").is_dir()


def test_others_may_ask_it_for_a_checkpoint_and_to_stop(keys: dict[str, Any]):
    """As the buttons of the live page do."""
    calls: list[int] = []

    def asking(completions: list[Any], **columns: Any) -> list[float]:
        calls.append(1)
        if len(calls) in (2, 4):
            ask(Path("runs/run"), "checkpoint" if len(calls) == 2 else "stop")
        return share_of_a(completions)

    summary = lachesis.train(**keys | {"rewards": asking, "run": {"steps": 50}}).wait(LONG_S)
    assert (summary.finished, summary.steps) == (False, 4)
    assert sorted(path.name for path in Path("runs/run/checkpoints").glob("step_*")) == ["step_000002", "step_000004"]
    assert not is_asked(Path("runs/run"), "stop"), "it is none to whoever goes on"


def test_what_goes_wrong_is_ours_and_raised_by_who_waits(keys: dict[str, Any], caplog: pytest.LogCaptureFixture):
    def broken(completions: list[Any], **columns: Any) -> list[float]:
        raise KeyError("answr")

    with caplog.at_level(logging.ERROR):
        run = lachesis.train(**keys | {"rewards": broken})
        with pytest.raises(lachesis.RewardError, match="reward function 'broken' raised KeyError: 'answr'"):
            run.wait(LONG_S)
    assert isinstance(run.error, lachesis.RewardError)
    assert "answr" in caplog.text
    with (
        pytest.raises(RuntimeError, match="of the block"),
        lachesis.train(**keys | {"run": {"steps": 900}}, overwrite=True),
    ):
        raise RuntimeError("of the block")
    with pytest.raises(lachesis.ConfigError, match="was not started by this handle"):
        lachesis.load(**keys).wait()


# A program that begins a run, and does not wait for it. Processes that a reward forks end without waiting, too.
PROGRAM = """
import multiprocessing
import lachesis

def share_of_a(completions, **columns):
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    child.join(20)
    assert child.exitcode == 0
    return [completion[0]["content"].count("a") / 6 for completion in completions]

rows = [{{"prompt": f"{{a}}{{b}}"}} for a in "abcd" for b in "abcd"]
sampling = {{"num_generations": 4, "max_completion_length": 6}}
run, checkpoint = {{"steps": {steps}, "name": "{name}"}}, {{"every_steps": 500}}
lachesis.train(model="model", data=rows, rewards=share_of_a, run=run, sampling=sampling, checkpoint=checkpoint)
{end}
"""


def test_a_script_that_ends_waits_for_its_run(model: Path):
    Path("script.py").write_text(PROGRAM.format(steps=2, name="waited", end=""))
    words = [sys.executable, "script.py"]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=LONG_S, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert "the program waits for its run" in done.stderr
    assert not re.search(r"W\d{4} |Failed to load", done.stderr), (
        "nothing of what libraries say while they are imported"
    )
    code = 'import lachesis; lachesis.load("runs/waited").export("twice")'
    exported = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False
    )
    assert "is a model already" in exported.stderr and "Failed to load" not in exported.stderr
    run = lachesis.load("runs/waited")
    assert (run.status.state, run.status.step) == ("finished", 2)
    assert run.model.is_dir()


def test_a_script_that_an_error_ends_stops_its_run(model: Path):
    code = PROGRAM.format(steps=500, name="stopped", end="1 / 0")
    done = warm.run([sys.executable, "-c", code], env=environment(), timeout=LONG_S)
    assert done.returncode == 1
    assert re.search("ZeroDivisionError ended the program: the run stops after this step.*/runs/stopped", done.stderr)
    _is_stopped("stopped")


def test_ctrl_c_at_the_end_of_a_script_stops_its_run(model: Path):
    words = [sys.executable, "-c", PROGRAM.format(steps=500, name="asked", end="")]
    with warm.Popen(words, env=environment(), stderr=subprocess.PIPE, text=True) as script:
        assert script.stderr is not None
        said = next(line for line in script.stderr if "the program waits for its run" in line)
        assert "press Ctrl-C to stop the run after this step" in said
        script.send_signal(signal.SIGINT)
        rest = script.stderr.read()
        assert script.wait(LONG_S) == 0
    assert "the run stops after this step and saves a checkpoint" in rest and "Traceback" not in rest
    _is_stopped("asked")


@pytest.mark.parametrize(
    "end",
    [
        pytest.param("", id="waiting"),
        pytest.param(
            "import time; time.sleep(1000)",
            id="in_its_own_code",
            marks=pytest.mark.long(
                "test_sigterm_saves_a_checkpoint_as_the_command_does[waiting]: while code of a user runs"
            ),
        ),
    ],
)
def test_sigterm_saves_a_checkpoint_as_the_command_does(model: Path, end: str):
    words = [sys.executable, "-c", PROGRAM.format(steps=500, name="terminated", end=end)]
    with warm.Popen(words, env=environment(), stderr=subprocess.PIPE, text=True) as script:
        until(lambda: (state := _state("terminated")) and state.get("step", 0) > 0, "a step of the run")
        script.send_signal(signal.SIGTERM)
        _, rest = script.communicate(timeout=LONG_S)
        assert script.returncode in (128 + signal.SIGTERM, -signal.SIGTERM)
    assert "the run stops after this step and saves a checkpoint" in rest and "Traceback" not in rest
    _is_stopped("terminated")


def _state(name: str) -> dict[str, Any]:
    path = Path(f"runs/{name}/state.json")
    return json.loads(path.read_text()) if path.exists() else {}


def _is_stopped(name: str) -> None:
    status = lachesis.load(f"runs/{name}").status
    assert status.state == "stopped" and 0 < status.step < 500
    assert Path(f"runs/{name}/checkpoints/step_{status.step:06d}").is_dir()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "data is empty"),
        ([1], "data, row 1: a number, not a dictionary"),
        ({"path": object()}, "data is a object, not a dataset"),
    ],
)
def test_what_is_no_dataset(keys: dict[str, Any], data: Any, message: str):
    with pytest.raises(lachesis.DataError, match=message):
        lachesis.train(**keys | {"data": data}).wait(LONG_S)


def test_functions_that_other_processes_are_to_run(keys: dict[str, Any]):
    run = lachesis.train(**keys | {"rewards": {"functions": [share_of_a], "num_workers": 1}})
    with pytest.raises(lachesis.ConfigError, match="share_of_a is a function of this program, which other processes"):
        run.wait(LONG_S)


def test_half_a_feed_is_refused(model: Path):
    with pytest.raises(lachesis.ConfigError, match="data without rewards"):
        lachesis.parts(model=model, data=ROWS)


def test_logprobs_are_those_of_sampling(model: Path):
    with lachesis.parts(model=model) as parts:
        parts.bridge.sync(0)
        prompts = [parts.policy.tokenizer.encode(row["prompt"]) for row in ROWS[:3]]
        groups = parts.engine.sample(prompts, n=5, max_tokens=3, seed=4, temperature=0.7)
        assert groups == parts.engine.sample(prompts, n=5, max_tokens=3, seed=4, temperature=0.7)
        found = parts.policy.logprobs(groups)
    for group, logprobs in zip(groups, found, strict=True):
        for sample, own in zip(group.samples, logprobs, strict=True):
            assert own.tolist() == pytest.approx(sample.logprobs, abs=1e-4)


def test_messages_are_sampled_through_the_chat_template(model: Path):
    asked = [{"role": "user", "content": "ab"}]
    with lachesis.parts(
        model={"path": model, "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}c"}
    ) as parts:
        parts.bridge.sync(0)
        chat, text = parts.sample([asked, "abc"], n=2, max_tokens=3, seed=4, temperature=0.0)
        assert (chat.prompt.text, chat.prompt.messages) == ("abc", (asked[0],))
        assert text.prompt.messages is None
        assert [sample.text for sample in chat.samples] == [sample.text for sample in text.samples]
    with (
        lachesis.parts(model=model) as parts,
        pytest.raises(lachesis.DataError, match=r"prompts\[0\].* no chat template"),
    ):
        parts.sample([asked], max_tokens=3)


@pytest.mark.parametrize("adapter", [{"kind": "none"}, {"kind": "lora", "r": 4}])
def test_a_finished_run_is_evaluated_again(keys: dict[str, Any], adapter: dict[str, Any]):
    held_out = {"path": ROWS, "eval_path": ROWS[:4]}
    run = lachesis.train(**keys | {"data": held_out, "adapter": adapter, "checkpoint": {"save_final": True}})
    run.wait()
    again, last = run.evaluate(), run.log.evaluations[-1]
    assert (again.step, again.problems, again.mean_reward) == (last.step, 4, pytest.approx(last.mean_reward))


def test_the_notebook_runs_cell_by_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """As Jupyter runs it: one namespace, on an event loop that is there already."""
    monkeypatch.chdir(tmp_path)
    path = ROOT / "docs" / "tutorials" / "notebook.ipynb"
    notebook = json.loads(path.read_text())
    assert notebook["nbformat"] == 4 and len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells), "outputs are a machine's own"
    names: dict[str, Any] = {"__name__": "__main__"}

    async def jupyter() -> None:
        for cell in cells:
            code = compile("".join(cell["source"]), f"{path}: {cell['id']}", "exec", PyCF_ALLOW_TOP_LEVEL_AWAIT)
            found = eval(code, names)
            if asyncio.iscoroutine(found):
                await found

    asyncio.run(jupyter())
    assert names["summary"].finished and names["last"] - names["first"] > 0.1
    assert "step 3: mean length " in capsys.readouterr().out
