"""What agents of verifiers run in: what a process of this machine cannot be is refused before anything is played."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lachesis.common.errors import ConfigError
from lachesis.common.types import SamplingParams
from lachesis.plugins.environments.turn_server import TurnServer
from lachesis.plugins.environments.verifiers.build import load_players
from lachesis.plugins.environments.verifiers.settings import VerifiersSettings, own_signals
from lachesis.rollouts.call_batcher import CallBatcher
from tests.fakes import FakeEngine
from tests.paths import EXAMPLES

pytest.importorskip("verifiers.v1")
PARAMS = SamplingParams(max_tokens=4)
# A task set whose class bears the name by which Harbor's is known, without Harbor.
LIKE_HARBOR = """
import verifiers.v1 as vf

__all__ = ["LikeHarbor"]


class HarborConfig(vf.TasksetConfig):
    pass


class LikeHarbor(vf.Taskset[vf.Task[vf.TaskData], HarborConfig]):
    def load(self):
        yield vf.Task(vf.TaskData(prompt="?"), self.config.task)
"""


def load(environment: Path, *, max_concurrent: int = 8, **agent: Any) -> None:
    server = TurnServer(CallBatcher(FakeEngine(), at_once=1), params=PARAMS, max_context=64, vocab_size=200)
    settings = VerifiersSettings(
        environment=str(environment), args={"agent": agent}, server=server, tokenizer=Path(), params=PARAMS,
        decode=lambda rows: [""] * len(rows), max_concurrent=max_concurrent,
    )  # fmt: skip
    with own_signals():
        load_players()(settings)


@pytest.mark.parametrize("harness", ["codex", "claude_code", "mini_swe_agent"])
def test_a_harness_that_needs_a_container_is_refused_as_a_process(harness: str):
    digits = EXAMPLES / "verifiers" / "digits_v1.py"
    with pytest.raises(ConfigError, match=f"{harness}.*runs only in a container") as caught:
        load(digits, harness={"id": harness})
    assert "agent.runtime: {type: docker}" in (caught.value.remedy or "")
    load(digits, harness={"id": harness}, runtime={"type": "docker"})
    load(digits, harness={"id": "bash"})


def test_rollouts_of_harbor_do_not_share_the_paths_of_one_machine(tmp_path: Path):
    (tmp_path / "like_harbor.py").write_text(LIKE_HARBOR)
    with pytest.raises(ConfigError, match="mix up their tests and rewards"):
        load(tmp_path / "like_harbor.py", max_concurrent=2)
    load(tmp_path / "like_harbor.py", max_concurrent=1)
    load(tmp_path / "like_harbor.py", max_concurrent=2, runtime={"type": "docker"})
