"""docs/custom.md: a run trains with each part of the page, and what is wrong with one is said by its name."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import lachesis
from lachesis.common.errors import ConfigError, TrainingError
from lachesis.config.custom import KINDS
from lachesis.config.load import load_config
from lachesis.config.rules import check
from lachesis.metrics.sinks.tape import read_groups
from lachesis.run.parts import CONTRACTS
from tests.e2e.runs import checkpoints, command, metrics, run_here, untimed, write_run
from tests.paths import DOCS

PAGE = (DOCS / "custom.md").read_text()
_SECTION = re.compile(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", re.M | re.S)


def _blocks(language: str, text: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.M | re.S)


# The Python of each section, and the keys that name it.
SECTIONS = {title: (_blocks("python", text), _blocks("yaml", text)) for title, text in _SECTION.findall(PAGE)}
SHORT: dict[str, dict[str, Any]] = {
    "run": {"steps": 2},
    "evaluation": {"every_steps": 0},
    "batch": {"prompts_per_step": 8},
    "sampling": {"num_generations": 4, "max_completion_length": 6},
}


def write_section(directory: Path, title: str, **more: dict[str, Any]) -> Path:
    """The files of a section beside a configuration that has its keys."""
    codes, (keys,) = SECTIONS[title]
    sections: dict[str, dict[str, Any]] = {**SHORT}
    for changes in (yaml.safe_load(keys), more):
        sections |= {name: sections.get(name, {}) | section for name, section in changes.items()}
    config = write_run(directory, **sections)
    for code in codes:
        (directory / code.splitlines()[0].removeprefix("# ")).write_text(code)
    return config


def test_the_page_has_a_section_for_each_kind_and_its_contract():
    assert [title.lower() for title in SECTIONS] == [kind.name for kind in KINDS]
    for name, contract in CONTRACTS.items():
        text = PAGE.partition(f"## {name.capitalize()}\n")[2].partition("```")[0]
        signature = " ".join(re.search(r"`\w+\((.*?)\)", text, re.S)[1].split())  # type: ignore[index]
        assert signature == ", ".join([*contract.given, *(["*", *contract.named] if contract.named else [])]), name


@pytest.mark.parametrize("title", SECTIONS)
def test_a_run_trains_with_each(title: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    config = write_section(tmp_path, title)
    with caplog.at_level(logging.WARNING, "lachesis"):
        assert run_here(config).finished
    assert "off for the rest" not in caplog.text
    run_dir = tmp_path / "runs/proof"
    seen = {"run_dir": run_dir, "values": [line.values for line in metrics(run_dir).steps]}
    assert _CHECKS[title](**seen), title


def _advantages(run_dir: Path) -> set[float]:
    groups = [group for path in (run_dir / "rollouts").glob("step_*.jsonl") for group in read_groups(path)]
    return {sample.advantage for group in groups for sample in group.samples}


def _findings(run_dir: Path) -> list[str]:
    return [finding.rule for line in metrics(run_dir).steps for finding in line.findings]


_CHECKS: dict[str, Any] = {
    "Reward": lambda run_dir, values: (
        values[0]["reward_metrics/longest"] > 0
        and "letters" in read_groups(next((run_dir / "rollouts").glob("step_*.jsonl")))[0].logged
    ),
    "Rollout function": lambda values, **_: all(v["reward"] == v["completion_length/mean"] for v in values),
    "Advantage": lambda run_dir, **_: _advantages(run_dir) <= {x / 4 for x in range(-3, 4)},
    "Loss": lambda values, **_: all("clipped_fraction" not in v for v in values),
    "Optimizer": lambda values, **_: all(v["grad_norm"] > 0 for v in values),
    "Sink": lambda run_dir, values: (
        (run_dir / "rewards.txt").read_text().split()
        == ["1", f"{values[0]['reward']:.3f}", "2", f"{values[1]['reward']:.3f}"]
    ),
    "Health rule": lambda run_dir, **_: "too_long" in _findings(run_dir),
    "Engine": lambda values, **_: all(v["canary_error"] < 1e-3 for v in values),
}


def test_a_run_goes_on_with_its_parts_exactly(tmp_path: Path):
    """Resumed from what its directory says, with the state of the optimizer."""
    parts = {"learning_rate": 1e-3, "function": "optimizer.py:Sign", "schedule": "linear"}
    configs = []
    for name in ("whole", "cut"):
        config = write_section(tmp_path / name, "Optimizer", optimizer=parts, run={"steps": 4})
        configs.append(config)
    run_here(configs[0])
    run_here(configs[1], stop_after=2)
    cut = tmp_path / "cut/runs/proof"
    assert checkpoints(cut) == ["step_000002"]
    run_here(cut / "config.yaml", resume=True)
    assert untimed(cut) == untimed(tmp_path / "whole/runs/proof")


def test_from_python_each_is_an_argument(tmp_path: Path):
    told: list[int] = []

    class Told(lachesis.Sink):
        def __init__(self, run_dir: Path) -> None:
            self.run_dir = run_dir

        def write(self, record: lachesis.StepRecord) -> None:
            told.append(record.step)

    run = lachesis.train(
        write_run(tmp_path, **SHORT),
        advantage=lambda rewards: rewards.sum(dim=1) - 0.25,
        loss=lambda logprobs, advantages: -logprobs * advantages,
        optimizer=_sgd,
        sinks=[Told],
        health_rules=lambda seen: lachesis.Alarm("note", "all is well"),
        run={"steps": 2},
    )
    assert run.wait().finished
    assert told == [1, 2]
    assert run.log.steps[0].findings[-1].message == "all is well"


def _sgd(params: Any, lr: float) -> Any:
    import torch

    return torch.optim.SGD(params, lr=lr)


@pytest.mark.parametrize(
    ("keys", "text", "error", "message"),
    [
        ({"algorithm": {"advantage": "mine.py:f"}}, "def f():\n    pass\n", ConfigError, "takes no rewards"),
        (
            {"logging": {"sinks": ["mine.py:f"]}},
            "def f(run_dir, setting):\n    pass\n",
            ConfigError,
            "needs an argument 'setting', which a sink does not get -> did you mean settings?",
        ),
        ({"logging": {"sinks": ["mine.py:f"]}}, "class f:\n    pass\n", ConfigError, "is no Sink"),
        (
            {"algorithm": {"advantage": "mine.py:f"}},
            "def f(rewards):\n    part = rewards.sum(dim=1)\n    return part / 'x'\n",
            TrainingError,
            r"the advantage \S*mine.py:f raised TypeError: .*\(mine.py:3\)",
        ),
    ],
)
def test_what_is_wrong_is_said_by_its_name(
    keys: dict[str, Any], text: str, error: type[Exception], message: str, tmp_path: Path
):
    config = write_run(tmp_path, **SHORT | keys)
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(error, match=message):
        run_here(config)


def test_a_sink_and_a_rule_that_fail_are_dropped_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    parts = {"sinks": ["mine.py:Broken"], "health_rules": ["mine.py:broken"]}
    config = write_run(tmp_path, **SHORT | {"logging": parts})
    (tmp_path / "mine.py").write_text(
        "import lachesis\n\n\n"
        "class Broken(lachesis.Sink):\n    def __init__(self, run_dir):\n        pass\n\n"
        "    def write(self, record):\n        record.values['nothing']\n\n\n"
        "def broken(seen):\n    return seen.nothing\n"
    )
    with caplog.at_level(logging.WARNING, "lachesis"):
        assert run_here(config).finished
    said = [record.message for record in caplog.records if "mine.py" in record.message]
    assert len(said) == 2
    assert any(
        re.search(r"sink \S*mine.py:Broken raised KeyError: 'nothing' \(mine.py:9\); Broken is off", one)
        for one in said
    )
    assert any(
        re.search(r"health rule \S*mine.py:broken raised AttributeError.*\(mine.py:13\); this rule is off from", one)
        for one in said
    )


def test_plan_lists_them_and_says_what_is_wrong(tmp_path: Path):
    config = write_section(tmp_path, "Advantage")
    done = command("plan", config)
    assert done.code == 0, done.err
    assert re.search(r"your own\n  advantage +\S*advantage.py:ranked \(algorithm.advantage\)", done.out)
    (tmp_path / "advantage.py").write_text("def ranked(rewards, *, rows):\n    pass\n")
    wrong = command("plan", config)
    assert wrong.code == 2
    assert "needs an argument 'rows', which an advantage does not get -> did you mean groups?" in wrong.err


def test_an_entry_point_of_an_installed_package_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "site"
    described = package / "ranks-1.0.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: ranks\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text("[lachesis.advantage]\nranked = ranks_of:ranked\n")
    (package / "ranks_of.py").write_text(SECTIONS["Advantage"][0][0])
    monkeypatch.syspath_prepend(str(package))
    config = write_run(tmp_path / "run", **SHORT | {"algorithm": {"advantage": "ranked"}})
    assert run_here(config).finished
    with pytest.raises(
        ConfigError, match=r"no installed package has an entry point lachesis.advantage .* mean ranked\?"
    ):
        check(load_config(config, overrides=["algorithm.advantage=rankd"]).config)
