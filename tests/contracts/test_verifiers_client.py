"""The multi-turn client of verifiers 0.1, from its own package, against the chat routes of an inference server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.contracts.bridge_cases import reset
from tests.contracts.servers import TOKEN, Server
from tests.paths import ROOT

OLD_LINE = ROOT / ".venv-verifiers-0.1"
PROGRAM = Path(__file__).with_name("old_client.py")


@pytest.mark.skipif(not OLD_LINE.is_dir(), reason="`make verifiers-0.1` installs it")
def test_its_turns_are_the_servers_tokens_and_no_turn_is_tokenized_again(embedded_server: Server):
    reset(embedded_server)
    program = [sys.executable, str(PROGRAM), str(embedded_server.http.base_url), TOKEN]
    ran = subprocess.run(program, env=os.environ | {"PYTHONPATH": str(OLD_LINE)}, capture_output=True, timeout=200)
    assert ran.returncode == 0, ran.stderr.decode()[-4000:]
    assert b"fell back" not in ran.stderr, "each later turn went on after the tokens of the last"
    rollouts = json.loads(ran.stdout)
    assert [len(steps) for steps in rollouts] == [3] * 4
    said = embedded_server.post("/tokenize", model="policy", prompt="ab")["tokens"]
    for steps in rollouts:
        for before, after in pairwise(steps):
            known = before["prompt_ids"] + before["completion_ids"]
            assert after["prompt_ids"][: len(known)] == known
            assert after["prompt_ids"][len(known) :] == said
        for step in steps:
            assert 1 <= len(step["completion_ids"]) == len(step["completion_logprobs"])
            assert all(value <= 0 for value in step["completion_logprobs"])
            assert step["completion_ids"][-1] in range(3, 60), "it ended as it was asked to"
