"""A run on the Hugging Face hub: a stand-in that takes what the real one takes, and refuses what it refuses."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import HfApi

from lachesis import __version__
from lachesis.cli.base import conclude
from lachesis.common.errors import CheckpointError, ConfigError
from lachesis.plugins.export import push as pushing
from lachesis.plugins.export.export import export
from lachesis.plugins.export.push import push, write_card
from lachesis.run.directory import noted_step
from lachesis.run.status import read_status
from lachesis.run.train import RunSummary
from tests.e2e.runs import run_here, write_run
from tests.ports import free_port

TOKEN = "hf_of_the_test"
BATCH = re.compile(r"/(.+)\.git/info/lfs/objects/batch")
COMMIT = re.compile(r"/api/models/(.+)/commit/([^/]+)")
PREUPLOAD = re.compile(r"/api/models/(.+)/preupload/([^/]+)")
BRANCH = re.compile(r"/api/models/(.+)/branch/([^/]+)")


class Hub(ThreadingHTTPServer):
    """Repositories with their files. Large files go where the hub wants them, by their digest, before a commit."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.branches: set[tuple[str, str]] = set()
        self.large: dict[str, bytes] = {}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        """Status and document."""
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            if not name.startswith("me/"):
                return 403, {"error": "you may not write there"}
            fresh = name not in self.repos
            if fresh:
                self.repos[name] = {}
                self.private[name] = asked.get("visibility") == "private"
                self.branches.add((name, "main"))
            return 200 if fresh else 409, {"url": f"{self.url}/{name}"}
        if path == "/api/validate-yaml":
            return self._validated(json.loads(body)["content"])
        if found := BATCH.fullmatch(path):
            return 200, {"transfer": "basic", "objects": [self._upload(one) for one in json.loads(body)["objects"]]}
        if found := BRANCH.fullmatch(path):
            there = found.groups() in self.branches
            self.branches.add((found[1], found[2]))
            return (409, {"error": "Reference already exists"}) if there else (201, {})
        found = COMMIT.fullmatch(path) or PREUPLOAD.fullmatch(path)
        if found is None or found.groups() not in self.branches:
            return 404, {"error": "Repository or branch not found"}
        if "/preupload/" in path:
            files = json.loads(body)["files"]
            return 200, {
                "files": [{"path": f["path"], "uploadMode": _mode(f["path"]), "shouldIgnore": False} for f in files]
            }
        return self._commit(found[1], [json.loads(line) for line in body.splitlines() if line])

    def _validated(self, content: str) -> tuple[int, Any]:
        fields = yaml.safe_load(content.split("---")[1])
        wrong = [name for name in ("base_model", "datasets") if "/" not in str(fields.get(name, "a/b"))]
        errors = [{"message": f'"{name}" must be an id of the hub'} for name in wrong]
        return (400 if errors else 200), {"errors": errors, "warnings": []}

    def _upload(self, one: dict[str, Any]) -> dict[str, Any]:
        return one | {"actions": {"upload": {"href": f"{self.url}/upload/{one['oid']}"}}}

    def _commit(self, repo: str, lines: list[dict[str, Any]]) -> tuple[int, Any]:
        for line in lines:
            value = line["value"]
            if line["key"] == "lfsFile":
                if value["oid"] not in self.large:
                    return 400, {"error": f"{value['path']} was not uploaded"}
                self.repos[repo][value["path"]] = self.large[value["oid"]]
            elif line["key"] == "file":
                if _mode(value["path"]) == "lfs":
                    return 400, {"error": f"{value['path']} has to be a large file"}
                self.repos[repo][value["path"]] = base64.b64decode(value["content"])
        oid = hashlib.sha1(json.dumps(lines).encode()).hexdigest()
        return 200, {"commitUrl": f"{self.url}/{repo}/commit/{oid}", "commitOid": oid, "success": True}


def _mode(path: str) -> str:
    return "lfs" if path.endswith((".safetensors", ".bin")) else "regular"


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}" or self.path == "/api/validate-yaml"
        status, document = (
            self.server.answer(self.path, body) if allowed else (401, {"error": "Invalid username or password."})
        )
        self._send(status, json.dumps(document).encode())

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        oid = self.path.rpartition("/")[2]
        if hashlib.sha256(body).hexdigest() != oid:
            self._send(400, b"")
            return
        self.server.large[oid] = body
        self._send(200, b"")

    def do_GET(self) -> None:
        self._send(404, b"{}")

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with Hub() as made:
        monkeypatch.setattr(pushing, "HfApi", lambda: HfApi(endpoint=made.url, token=TOKEN))
        yield made
        made.shutdown()


# A base model as the hub knows it; it lies in the cache of this machine, where a download would have put it.
BASE, REVISION = "letters-lab/base", "0" * 40
LORA = {"adapter": {"kind": "lora", "r": 4}}


@pytest.fixture(scope="module")
def adapter_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a LoRA adapter on a base model of the hub, with a checkpoint before its last step."""
    directory = tmp_path_factory.mktemp("adapter")
    cached = directory / "hub" / f"models--{BASE.replace('/', '--')}"
    run = {"name": "adapted", "dir": str(directory / "runs"), "steps": 3}
    sections = {"model": {"path": BASE}, "data": {"eval_size": 0}, "checkpoint": {"save_final": True, "every_steps": 2}}
    config = write_run(directory, run=run, **sections, **LORA)
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(REVISION)
    (cached / "snapshots").mkdir()
    (directory / "model").rename(cached / "snapshots" / REVISION)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(directory / "hub"))
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        return run_here(config).run_dir


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pushed")
    run = {"name": "letters", "dir": str(directory / "runs"), "steps": 6}
    return run_here(write_run(directory, run=run, checkpoint={"save_final": True})).run_dir


def test_the_model_is_there_with_its_card(hub: Hub, run_dir: Path):
    address = push(run_dir, repo="letters")
    files = hub.repos["me/letters"]
    assert address.startswith(f"{hub.url}/me/letters/commit/")
    assert files["model.safetensors"] == (run_dir / "final" / "model.safetensors").read_bytes()
    assert {"config.json", "tokenizer.json", "README.md"} <= files.keys()
    push(run_dir, repo="letters")  # once more is another commit


def test_the_card_says_how_it_was_trained(run_dir: Path):
    text = write_card(run_dir).read_text()
    fields = yaml.safe_load(text.split("---")[1])
    assert fields["library_name"] == "transformers" and "grpo" in fields["tags"]
    assert "base_model" not in fields, "a directory of this machine is no model of the hub"
    assert "# letters" in text and "| steps | 6 |" in text and "mean reward" in text and "1 to 1" in text
    assert "| prompts a step |" in text and "pushed" not in text, "nor its directories"
    assert noted_step(run_dir / "final") == 6, "should the run go on, and be stopped"


def test_an_adapter_is_there_as_peft_loads_it_with_its_base_model(hub: Hub, adapter_run: Path):
    push(adapter_run, repo="adapted")
    files = hub.repos["me/adapted"]
    assert files["adapter_model.safetensors"] == (adapter_run / "final" / "adapter_model.safetensors").read_bytes()
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == BASE
    assert "tokenizer.json" in files and not [name for name in files if name.startswith("model")]
    card = files["README.md"].decode()
    fields = yaml.safe_load(card.split("---")[1])
    assert (fields["library_name"], fields["base_model"]) == ("peft", BASE)
    assert "| LoRA rank | 4 |" in card and "| steps | 3 |" in card
    assert f"GRPO by Lachesis {__version__}: {BASE}, LoRA" in card


@pytest.mark.parametrize(("merge", "library"), [(False, "peft"), (True, "transformers")], ids=["adapter", "merged"])
def test_a_checkpoint_of_an_adapter_is_pushed_as_it_is_exported(
    hub: Hub, adapter_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merge: bool, library: str
):
    """A run that was stopped early has no final model: what is exported in its place is what is pushed."""
    stopped = tmp_path / "stopped"
    shutil.copytree(adapter_run, stopped)
    shutil.rmtree(stopped / "final")
    with pytest.raises(CheckpointError, match="has no model"):
        push(stopped, repo="stopped")
    for name, value in (("HF_HUB_CACHE", str(adapter_run.parents[1] / "hub")), ("HF_HUB_OFFLINE", True)):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    export(stopped / "checkpoints" / "step_000002", stopped / "final", merge=merge)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    push(stopped, repo="stopped")
    files = hub.repos["me/stopped"]
    fields = yaml.safe_load(files["README.md"].decode().split("---")[1])
    assert (fields["library_name"], fields["base_model"]) == (library, BASE)
    assert ("adapter_model.safetensors" in files, "model.safetensors" in files) == (not merge, merge)


def run_to_the_hub(directory: Path, **hub: Any) -> RunSummary:
    run = {"name": "sent", "dir": str(directory / "runs"), "steps": 2}
    checkpoint = {"save_final": True, "hub": hub}
    return run_here(write_run(directory, run=run, data={"eval_size": 0}, checkpoint=checkpoint))


def test_a_run_uploads_its_model_at_its_end_where_that_is_asked_for(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    summary = run_to_the_hub(tmp_path, repo="me/sent", private=True, revision="tried")
    assert summary.finished and summary.pushed and summary.pushed.startswith(f"{hub.url}/me/sent/commit/")
    assert hub.private == {"me/sent": True} and ("me/sent", "tried") in hub.branches
    assert b"| steps | 2 |" in hub.repos["me/sent"]["README.md"]
    conclude(summary, [], [])
    assert f"pushed: {summary.pushed}" in capsys.readouterr().out
    push(summary.run_dir, repo="me/sent", revision="tried")  # once more is another commit


def test_an_upload_that_fails_loses_no_model_and_says_how_to_try_again(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(pushing, "get_token", lambda: None)
    with pytest.raises(ConfigError) as failed:
        run_to_the_hub(tmp_path, repo="another/sent", private=True)
    assert "you are not logged in to the Hugging Face hub" in caplog.text, "said before the run"
    run_dir = tmp_path / "runs" / "sent"
    assert f"its model is in {run_dir / 'final'}, but another/sent could not be pushed" in failed.value.message
    assert failed.value.remedy.endswith(f"then: lachesis push {run_dir} --repo another/sent --private")
    assert (run_dir / "final" / "model.safetensors").exists() and read_status(run_dir).state == "finished"


def test_who_may_not_write_is_told_so(hub: Hub, run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pushing, "HfApi", lambda: HfApi(endpoint=hub.url, token="hf_another"))
    with pytest.raises(ConfigError, match=r"could not be pushed to .*401.* -> check that it can be reached, log in"):
        push(run_dir, repo="letters")
    monkeypatch.setattr(pushing, "HfApi", lambda: HfApi(endpoint=f"http://127.0.0.1:{free_port()}", token=TOKEN))
    with pytest.raises(ConfigError, match=r"could not be pushed to .* refused"):
        push(run_dir, repo="letters")
    with pytest.raises(CheckpointError, match="has no model"):
        write_card(run_dir / "logs")
