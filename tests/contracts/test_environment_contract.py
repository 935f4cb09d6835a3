"""What every environment that plays episodes owes to a source, over a fake engine and the real library.

The lines of verifiers cannot be in one Python, so each is played in a process of its own, which writes what it got.
What is stepped is played here.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lachesis.common.deadline import Deadline
from lachesis.common.errors import ConfigError
from lachesis.config.schema import AlgorithmConfig
from lachesis.plugins.environments.steps.game import Action
from lachesis.plugins.environments.steps.openenv import OpenEnvGame, OpenEnvServer, find_server
from lachesis.process.managed import ManagedProcess
from lachesis.rollouts.episodes import RolloutFailed
from lachesis.train.losses.advantage import advantage_function
from tests.contracts import play
from tests.paths import ROOT
from tests.ports import free_port
from tests.tiny import EOS_ID, tiny_tokenizer
from tests.waiting import LONG_S

OLD_LINE = ROOT / ".venv-verifiers-0.1"
OPENENV = ROOT / ".venv-openenv"
GAMES = ROOT / "examples" / "environments" / "steps.py"
TODAY = pytest.param(
    "v1",
    marks=pytest.mark.skipif(importlib.util.find_spec("verifiers") is None, reason="verifiers is not installed"),
    id="verifiers",
)
LINE_01 = pytest.param(
    "v01",
    marks=pytest.mark.skipif(not OLD_LINE.is_dir(), reason="`make verifiers-0.1` installs it"),
    id="verifiers 0.1",
)
STEPPED = [
    pytest.param(("Guess", {}), id="gymnasium"),
    pytest.param(("GuessTools", {"calls": True}), id="trl"),
    pytest.param(
        ("openenv", {}),
        marks=pytest.mark.skipif(not OPENENV.is_dir(), reason="`make openenv` installs its server"),
        id="openenv",
    ),
]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
SIZE, GROUPS = 4, 3
Documents = list[dict[str, Any]]


@contextmanager
def openenv_server(directory: Path) -> Iterator[str]:
    """OpenEnv's own server with the same game; yields its address."""
    port = free_port()
    command = [sys.executable, "-m", "tests.contracts.openenv_server", str(OPENENV), str(port)]
    url = f"http://127.0.0.1:{port}"
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    server = ManagedProcess(command, url=url, log_path=directory / "openenv.log", env={"PYTHONPATH": paths})
    server.start(deadline=Deadline("the start of OpenEnv's server", LONG_S))
    try:
        yield url
    finally:
        server.stop()


@pytest.fixture(scope="module")
def of_verifiers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What a source got of environments of a line, which are played once, in a process of its own."""

    @cache
    def of(line: str) -> dict[str, Any]:
        directory = tmp_path_factory.mktemp("played")
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(directory / "tokenizer")
        path = [str(OLD_LINE)] * (line == "v01") + [str(ROOT / "src"), str(ROOT)]
        program = [sys.executable, "-m", "tests.contracts.play", line, str(directory)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
        ran = subprocess.run(program, cwd=ROOT, env=env, capture_output=True, timeout=300)
        assert ran.returncode == 0, ran.stderr.decode()[-4000:]
        return json.loads((directory / "played.json").read_text())

    return of


@pytest.fixture(scope="module", params=[TODAY, LINE_01, *STEPPED])
def played(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, of_verifiers: Any
) -> dict[str, Any]:
    """What a source got of the guessing game of an example, with rollouts of which some were made to fail."""
    if isinstance(request.param, str):
        return of_verifiers(request.param)
    name, options = request.param
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    if name != "openenv":
        return play.steps(f"{GAMES}:{name}", tokenizer, **options)
    with openenv_server(tmp_path_factory.mktemp("played")) as url:
        return play.steps(url, tokenizer, **options)


def test_groups_are_whole(played: dict[str, Any]):
    assert len(played["groups"]) == GROUPS
    for group in played["groups"]:
        assert len(group) == SIZE
        assert all(sample["rewards"] == [sample["reward"]] for sample in group)


def test_tokens_are_exactly_those_that_the_engine_sampled(played: dict[str, Any]):
    """Each turn's tokens, with the logprobs and the prompt that it was sampled with."""
    sampled = {(tuple(prompt), tuple(ids)): logprobs for prompt, ids, logprobs in played["sampled"]}
    for sample in (sample for group in played["groups"] for sample in group):
        sequence, start = [*sample["prompt_ids"], *sample["completion_ids"]], len(sample["prompt_ids"])
        for first, last in runs_of(sample["mask"]):
            key = tuple(sequence[: start + first]), tuple(sequence[start + first : start + last])
            assert sample["logprobs"][first:last] == sampled[key]


def test_masks_leave_out_what_the_environment_said(played: dict[str, Any]):
    turns = [list(runs_of(sample["mask"])) for group in played["groups"] for sample in group]
    assert max(map(len, turns)) > 1, "some rollouts have several turns"
    for sample, found in zip((sample for group in played["groups"] for sample in group), turns, strict=True):
        assert sample["mask"][-1] == 1
        assert all(sample["completion_ids"][last - 1] == EOS_ID for _, last in found)


def test_rewards_are_the_rubrics(played: dict[str, Any]):
    rewards = {round(sample["reward"], 6) for group in played["groups"] for sample in group}
    assert rewards <= {0.0, 0.333333, 0.666667, 1.0} and len(rewards) > 1


def test_what_fails_is_left_out_and_counted(played: dict[str, Any]):
    assert played["failed"]["samples"] < SIZE * GROUPS
    lost = SIZE * GROUPS - played["failed"]["samples"]
    assert played["failed"]["counters"]["rollout_failures"] == lost
    assert set(played["failed"]["others"]) <= set(played["all"]), "and changes nothing about the others"


@pytest.mark.parametrize("line", [TODAY, LINE_01])
def test_what_verifiers_loses_changes_nothing_about_the_others(line: str, of_verifiers: Any):
    """About 15 % are lost: the environment falls over, or its judge does. As the advantages are, so are the rewards."""
    lossy = of_verifiers(line)["lossy"]["alone"]
    found, whole = lossy["found"], lossy["whole"]
    missing = sum(map(len, whole)) - sum(map(len, found))
    assert sum(map(len, whole)) == play.LOSSY_GROUPS * play.LOSSY_SIZE and 0.1 < missing / sum(map(len, whole)) < 0.25
    counts = lossy["counters"]
    causes = {"v1": ("os", "task"), "v01": ("environment", "reward")}[line]
    assert counts["rollout_failures"] == sum(counts[f"rollout_failures/{cause}"] for cause in causes) == missing
    assert min(counts[f"rollout_failures/{cause}"] for cause in causes) > 0
    survivors = survivors_of(whole, found)
    assert [len(group) for group in survivors] == [len(group) for group in found]
    assert found == survivors
    assert advantages(found) == advantages(survivors) and any(advantages(found))


@pytest.mark.parametrize("line", [LINE_01])
def test_who_is_compared_with_the_others_is_not_with_those_that_are_lost(line: str, of_verifiers: Any):
    """A function of the rubric looks at all rollouts of a group: how often was said first what this one said first."""
    lossy = of_verifiers(line)["lossy"]
    found, alone = lossy["together"]["found"], lossy["alone"]["found"]
    for together, apart in zip(found, alone, strict=True):
        first = [sample["completion_ids"][0] for sample in together]
        expected = [one["reward"] + first.count(said) / len(first) for one, said in zip(apart, first, strict=True)]
        assert [sample["reward"] for sample in together] == pytest.approx(expected)
    assert [[one["completion_ids"] for one in group] for group in found] == [
        [one["completion_ids"] for one in group] for group in alone
    ]


def survivors_of(whole: list[Documents], found: list[Documents]) -> list[Documents]:
    """Of the groups of a run without losses what the run with losses has too."""
    names = [[one["completion_ids"] for one in group] for group in found]
    return [[one for one in group if one["completion_ids"] in left] for group, left in zip(whole, names, strict=True)]


def advantages(groups: list[Documents]) -> list[float]:
    compute = advantage_function(AlgorithmConfig(), weights=None)
    rows = [(number, one) for number, group in enumerate(groups) for one in group]
    lengths = [len(one["completion_ids"]) for _, one in rows]
    return compute([one["rewards"] for _, one in rows], [number for number, _ in rows], lengths)


def test_a_deadline_ends_rollouts_and_nothing_is_left(played: dict[str, Any]):
    assert played["cancelled"] == {"error": "DeadlineExceeded", "tasks_left": 0, "again": True}


def test_held_out_tasks_are_played(played: dict[str, Any]):
    assert played["evaluated"]["problems"] == 2
    assert 0.0 <= played["evaluated"]["mean_reward"] <= 1.0


def runs_of(mask: list[int]) -> list[tuple[int, int]]:
    """Where runs of ones begin and end."""
    edges = [place for place, (a, b) in enumerate(zip([0, *mask], [*mask, 0], strict=True)) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))


@pytest.mark.skipif(not OPENENV.is_dir(), reason="`make openenv` installs its server")
def test_what_a_server_of_openenv_refuses_is_told_or_fails_the_rollout(tmp_path: Path):
    """An action that is none is the model's fault; what the environment raises, and a lost server, are not."""

    async def play(game: OpenEnvGame, said: str) -> Any:
        try:
            await game.begin()
            return await game.step(Action(said, said))
        finally:
            await game.close()

    with openenv_server(tmp_path) as url:
        assert find_server(url, {}) == OpenEnvServer(url, "guess")
        told = asyncio.run(play(OpenEnvGame(OpenEnvServer(url, "number"), {}), "3"))
        assert not told.done and "error: Invalid message" in told.messages[0]["content"]
        shown = asyncio.run(play(OpenEnvGame(OpenEnvServer(url, "guess", "text"), {"seed": 4}), "3"))
        assert shown.messages[0]["content"] == "+" and not shown.done
        with pytest.raises(RolloutFailed, match="no game today") as failed:
            asyncio.run(play(OpenEnvGame(OpenEnvServer(url, "guess"), {"fail": True}), "3"))
        assert failed.value.cause == "environment"
    with pytest.raises(RolloutFailed) as failed:
        asyncio.run(play(OpenEnvGame(OpenEnvServer(url, "guess"), {}), "3"))
    assert failed.value.cause == "connection"
    with pytest.raises(ConfigError, match="no OpenEnv server answers"):
        find_server(url, {})


@pytest.mark.parametrize("line", [LINE_01])
def test_fields_that_a_renderer_would_ignore_are_refused(line: str, of_verifiers: Any):
    parsers, unknown, name = of_verifiers(line)["renderers"]
    assert "qwen3 parses by itself and takes no tool_parser" in parsers
    assert "enable_thinkin" in unknown and "Unknown renderer 'qwen33'" in name
