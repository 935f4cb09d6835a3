"""What `lachesis env eval` is asked for, and which environment a name means."""

from __future__ import annotations

import pytest

from lachesis.common.errors import ConfigError
from lachesis.plugins.atropos.environments.shipped import Arithmetic, ReasoningGym
from lachesis.plugins.atropos.episode_trials import StepsTrial, VerifiersTrial
from lachesis.plugins.atropos.evaluate import parse_trial, resolve
from tests.paths import EXAMPLES


def test_short_flags_are_those_of_every_environment():
    trial = parse_trial(["--engine", "http://h:1", "--tasks=8", "--samples", "2", "--env.seed", "3", "--json", "-"])
    assert trial.rest == ("--openai.base_url=http://h:1", "--env.eval_num=8", "--env.seed", "3")
    assert (trial.samples, trial.json, trial.greedy, trial.model) == (2, "-", False, None)
    assert parse_trial(["--greedy"]).samples == 1 and parse_trial([]).rest == ("--env.eval_num=32",)


@pytest.mark.parametrize("words", [["--samples", "0"], ["--samples", "x"], ["--engine"], ["--json", "--greedy"]])
def test_wrong_ones_are_said(words: list[str]):
    with pytest.raises(ConfigError, match=words[0]):
        parse_trial(words)


def test_names_of_all_kinds_are_found():
    assert resolve("arithmetic") == (Arithmetic, [])
    assert resolve("reasoning_gym:gcd?size=5") == (ReasoningGym, ["--env.tasks=gcd?size=5"])
    assert resolve("lachesis.plugins.atropos.environments.shipped.arithmetic.Arithmetic") == (Arithmetic, [])
    assert resolve("gsm8k-v1") == (VerifiersTrial, ["--env.environment=gsm8k-v1"])
    assert resolve("mine/sums.py") == (VerifiersTrial, ["--env.environment=mine/sums.py"])
    guess = f"{EXAMPLES / 'environments' / 'steps.py'}:Guess"
    assert resolve(guess) == (StepsTrial, [f"--env.environment={guess}"])
    with pytest.raises(ConfigError, match="is not an environment"):
        resolve("lachesis.common.types.Prompt")
