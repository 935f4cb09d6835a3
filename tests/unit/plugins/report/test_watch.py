"""The live page's server: what it says of a run, and whom it lets stop one."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from lachesis.common.types import Group, Prompt, Sample, StepRecord, VersionSpan
from lachesis.metrics.sinks.jsonl import JsonlSink
from lachesis.metrics.sinks.tape import TapeSink
from lachesis.plugins.report.watch import Watch
from lachesis.run.requests import ask, either, is_asked, take

TOKEN = {"X-Lachesis-Token": "secret"}


def sample(text: str, reward: float | None) -> Sample:
    return Sample((1,), (2,), (0.0,), "stop", VersionSpan(0, 0), text=text, rewards=(reward,), reward=reward)


def write_run(path: Path, *, steps: int = 2, status: str = "running", seed: int = 0, rate: float = 1e-6) -> Path:
    path.mkdir(parents=True)
    settings = {"run": {"name": path.name, "seed": seed}, "optimizer": {"learning_rate": rate}}
    (path / "config.yaml").write_text(json.dumps(settings))
    state = {"status": status, "pid": os.getpid(), "host": socket.gethostname(), "began": time.time(), "step": steps}
    (path / "state.json").write_text(json.dumps(state))
    lines, tape = JsonlSink(path / "metrics.jsonl"), TapeSink(path / "rollouts")
    for step in range(1, steps + 1):
        group = Group(Prompt("7", (1,), "2+2="), (sample("4", 1.0), sample("5", 0.0), sample("?", None)))
        record = StepRecord(
            step=step, values={"reward": 0.25 * step + seed, "reward_metrics/tools": 3.0}, groups=[group]
        )
        lines.write(record)
        tape.write(record)
    lines.close()
    return path


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "first")


def client(*run_dirs: Path, address: str = "http://127.0.0.1") -> TestClient:
    return TestClient(Watch(run_dirs, token="secret").app(), base_url=address)


def test_the_page_is_one_file(run_dir: Path):
    answer = client(run_dir).get("/")
    assert answer.status_code == 200
    assert '["first"]' in answer.text
    assert "https:" not in answer.text and "src=" not in answer.text


def test_the_report_comes_once_and_again_when_there_is_news(run_dir: Path):
    page = client(run_dir)
    first = page.get("/data").json()
    charts = {chart["id"]: chart for chart in first["data"]["charts"]}
    assert charts["reward"]["series"][0]["y"] == [0.25, 0.5]
    assert charts["reward_metrics/tools"]["title"] == "tools"
    assert 'id="charts"' in first["html"] and "<html" not in first["html"]
    assert dict(first["status"])["state"].startswith("running, step 2")
    assert dict(first["lead"])["state"] == "running" and dict(first["lead"])["step"].startswith("2")
    again = page.get("/data", params={"known": first["tag"]}).json()
    assert (again["html"], again["data"], again["tag"]) == (None, None, first["tag"])
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"type": "step", "step": 3, "time": 1.0, "values": {"reward": 0.9}}) + "\n")
    news = page.get("/data", params={"known": first["tag"]}).json()
    assert news["data"]["charts"][0]["series"][0]["y"] == [0.25, 0.5, 0.9]


def test_a_run_without_a_step(tmp_path: Path):
    path = write_run(tmp_path / "new", steps=0)
    (path / "metrics.jsonl").unlink()
    assert "No step is done yet" in client(path).get("/data").json()["html"]


def test_only_who_has_the_token_may_ask(run_dir: Path):
    page = client(run_dir)
    for headers in ({}, {"X-Lachesis-Token": "secres"}, {b"X-Lachesis-Token": b"secr\xe9t"}):
        assert page.post("/stop", headers=headers).status_code == 403
    assert not is_asked(run_dir, "stop")
    assert page.get("/stop", headers=TOKEN).status_code == 405
    assert page.post("/stop", headers=TOKEN).status_code == 200
    assert is_asked(run_dir, "stop")
    assert page.post("/checkpoint", headers=TOKEN).status_code == 200
    assert [take(run_dir, "checkpoint") for _ in range(2)] == [True, False]


def test_a_run_is_paused_and_goes_on(run_dir: Path):
    page = client(run_dir)
    assert page.post("/pause").status_code == page.post("/resume").status_code == 403
    assert not page.get("/data").json()["paused"]
    assert page.post("/pause", headers=TOKEN).text == "requested; it happens after this step"
    assert is_asked(run_dir, "pause") and page.get("/data").json()["paused"]
    assert page.post("/resume", headers=TOKEN).text == "requested; it resumes"
    assert not is_asked(run_dir, "pause")


def test_the_engines_and_what_is_waited_for_until_when(run_dir: Path):
    engine = {"url": "http://a:9", "state": "suspect", "version": 2, "in_flight": 3, "reason": "no answer"}
    wait = {"name": "a batch", "since": time.time() - 30, "limit_s": 60.0}
    content = {"pid": os.getpid(), "waits": [wait, {"name": "scoring"}], "engines": [engine]}
    (run_dir / "live.json").write_text(json.dumps(content))
    found = client(run_dir).get("/data").json()
    (row,) = found["engines"]
    assert {name: row[name] for name in engine} == engine
    batch, scoring = found["waits"]
    assert batch["text"].startswith("a batch: for 30 s") and batch["share"] == pytest.approx(0.5, abs=0.05)
    assert "no deadline" in scoring["text"] and scoring["share"] is None
    assert not {"waits", "engines"} & {title for title, _ in found["status"]}, "they are beside it"
    state = json.loads((run_dir / "state.json").read_text())
    (run_dir / "state.json").write_text(json.dumps(state | {"status": "paused"}))
    assert client(run_dir).get("/data").json()["waits"][0]["share"] is None, "its time does not pass"
    (run_dir / "state.json").write_text(json.dumps(state | {"status": "finished"}))
    assert client(run_dir).get("/data").json()["waits"] == []


def test_a_run_that_is_not_there_yet(tmp_path: Path):
    found = client(tmp_path / "soon").get("/data").json()
    assert found["lead"] == [["state", "loading: the run has no directory yet"]]
    assert "No step is done yet" in found["html"]


def test_what_has_ended_is_not_asked(tmp_path: Path):
    answer = client(write_run(tmp_path / "old", status="finished")).post("/stop", headers=TOKEN)
    assert (answer.status_code, answer.text) == (409, "the run is not running: it is finished")


def test_other_names_and_other_runs_are_refused(run_dir: Path):
    assert client(run_dir, address="http://rebound.example").get("/data").status_code == 403
    answer = client(run_dir).get("/data", params={"run": "1"})
    assert (answer.status_code, answer.text) == (404, "there is no run '1' on this page")


def test_several_runs_side_by_side(tmp_path: Path):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", rate=1e-5)]
    answer = client(*runs).get("/compare").json()
    (reward,) = [chart for chart in answer["data"]["charts"] if chart["id"] == "reward"]
    assert [series["label"] for series in reward["series"]] == ["a", "b"]
    assert "optimizer.learning_rate" in answer["html"] and "2+2=" in answer["html"]
    assert [name for name, _ in answer["lead"]] == ["a", "b"]


def test_requests_are_files_of_the_run(tmp_path: Path):
    asked = either(lambda: False, lambda: is_asked(tmp_path, "stop"))
    assert not asked()
    ask(tmp_path, "stop")
    assert asked()


def test_rollouts_are_searched_and_one_is_read(run_dir: Path):
    found = client(run_dir).get("/rollouts", params={"find": "5", "steps": "1-1"}).json()
    assert [(hit["place"], hit["reward"]) for hit in found["hits"]] == [("1:1:2", 0.0)] and not found["more"]
    everything = client(run_dir).get("/rollouts", params={"find": "2+2", "least": "0.5"}).json()
    assert [hit["place"] for hit in everything["hits"]] == ["2:1:1", "1:1:1"], "the text as it stands, no pattern"
    one = client(run_dir).get("/rollout", params={"place": "1:1:2"}).json()
    assert [turn["text"] for turn in one["turns"]] == ["2+2=", "5"]
    assert client(run_dir).get("/rollouts", params={"failed": "on"}).json() == {"failures": []}


@pytest.mark.parametrize(
    ("path", "params", "message"),
    [
        ("/rollout", {"place": "1:9:1"}, "there is no rollout 1:9:1"),
        ("/rollouts", {"least": "much"}, "'much' is not a number"),
        ("/rollouts", {"steps": "x"}, "neither a step nor FIRST-LAST"),
        ("/rollouts", {"steps": "1" * 5000}, "neither a step nor FIRST-LAST"),
        ("/rollout", {"place": "1" * 5000 + ":1:1"}, "is not the place of a rollout"),
        ("/data", {"run": "1" * 5000}, "there is no run '1111"),
    ],
)
def test_what_cannot_be_found_is_said(run_dir: Path, path: str, params: dict[str, str], message: str):
    answer = client(run_dir).get(path, params=params)
    assert answer.status_code == 404 and message in answer.text
