"""Servers that a run is asked to take, and to part with."""

from __future__ import annotations

from pathlib import Path

import pytest

from lachesis import cli
from lachesis.common.errors import ConfigError, DataError
from lachesis.plugins.cluster.fleet import add, drain
from lachesis.run.fleet import changes
from tests.logs import handlers_kept

CONFIG = """
run: {{name: r, steps: 2}}
model: {{path: a/model}}
data: {{path: a/dataset}}
rewards: {{functions: [rewards.right]}}
{engine}
"""
URLS = "engine: {kind: http, urls: ['http://a:1', 'http://b:2/v1']}\nbridge: {kind: broadcast}"


def run_with(directory: Path, engine: str) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(CONFIG.format(engine=engine))
    return directory


def test_what_was_asked_is_kept_in_order(tmp_path):
    run = run_with(tmp_path / "r", URLS)
    assert add(run, "http://c:3/v1/") == "http://c:3"
    assert drain(run, "http://b:2") == "http://b:2"
    assert (changes(run).added, changes(run).drained) == (("http://c:3",), ("http://b:2",))
    drain(run, "http://c:3")
    add(run, "http://b:2")
    assert (changes(run).added, changes(run).drained) == (("http://b:2",), ("http://c:3",))


def test_the_last_engine_stays_and_others_are_unknown(tmp_path):
    run = run_with(tmp_path / "r", URLS)
    with pytest.raises(ConfigError, match="http://c:3 is not an engine of") as raised:
        drain(run, "http://c:3")
    assert "http://a:1, http://b:2" in raised.value.remedy
    drain(run, "http://a:1")
    with pytest.raises(ConfigError, match="the only engine"):
        drain(run, "http://b:2")


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("engine: {kind: vllm}\nbridge: {kind: broadcast}", "engine.kind vllm: the run starts its engines itself"),
        ("engine: {kind: http}\nbridge: {kind: shared_vllm}", "trains on the memory of its one engine"),
    ],
)
def test_a_run_whose_engines_stay_says_so(tmp_path, engine: str, said: str):
    with pytest.raises(ConfigError, match=said):
        add(run_with(tmp_path / "r", engine), "http://c:3")


def test_there_has_to_be_a_run(tmp_path):
    with pytest.raises(DataError, match="holds no run"):
        add(tmp_path, "http://c:3")
    run = run_with(tmp_path / "r", URLS)
    (run / "fleet.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        changes(run)


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["lachesis", "fleet", *words])
    with handlers_kept(), pytest.raises(SystemExit) as exit_:
        cli.main()
    return int(exit_.value.code or 0)


def test_the_command(tmp_path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    run = run_with(tmp_path / "r", URLS)
    assert command(monkeypatch, "add", "http://c:3", "--run", str(run)) == 0
    assert "http://c:3 joins" in capsys.readouterr().out
    assert changes(run).added == ("http://c:3",)
    assert command(monkeypatch, "drain", "http://a:1", "--run", str(run)) == 0
    assert changes(run).drained == ("http://a:1",)
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, "add", "http://c:3") == 2
    assert "no run in runs/ is running" in capsys.readouterr().err
