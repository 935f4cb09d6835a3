"""Recipes of tinker-cookbook, unchanged, against `lachesis tinker-server`.

What they would download lies in the directory in which they run, under the hub's names: datasets, and a tiny model with
its tokenizer.
"""

from __future__ import annotations

import json
import os
import random
import string
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests import warm
from tests.e2e.tinker_server import KEY, tinker_server
from tests.paths import ROOT, SOURCE
from tests.tiny import tiny_model, tiny_tokenizer

COOKBOOK = ROOT / ".venv-tinker"
MODEL = "Qwen/Qwen3-8B-Base"
SL_STEPS, RL_STEPS = 30, 6

# A supervised start, reinforcement learning that goes on from its checkpoint, and the recipe with the long loop, with
# values that could stand on their command lines; then two by their command lines. These have no key for the server's
# address. Their own renderer needs tokens that the tiny model has not.
RECIPES = f"""
import asyncio, runpy, sys
from tinker_cookbook.recipes import rl_loop, sl_loop
from tinker_cookbook.recipes.math_rl import train
from tinker_cookbook.renderers import TrainOnWhat
shared = dict(base_url=sys.argv[1], model_name={MODEL!r}, lora_rank=8, save_every=0)
sl_loop.main(sl_loop.Config(
    **shared, log_path="loops", batch_size=8, learning_rate=1e-2, max_length=700,
    train_on_what=TrainOnWhat.LAST_ASSISTANT_MESSAGE,
))
rl_loop.main(rl_loop.Config(
    **shared, log_path="loops", batch_size=4, group_size=8, learning_rate=5e-3, max_tokens=12,
    loss_fn="importance_sampling", max_steps={SL_STEPS + RL_STEPS},
))
asyncio.run(train.cli_main(train.CLIConfig(
    **shared, log_path="math", env="arithmetic", group_size=4, groups_per_batch=2, eval_every=0,
    loss_fn="importance_sampling", max_steps=1,
)))
for recipe, *words in (
    ("multiplayer_rl.guess_number", "log_path=guesses", "batch_size=1", "group_size=2", "max_steps=1"),
    ("preference.shorter", "log_path=shorter", "batch_size=4", "group_size=4", "learning_rate=1e-2", "max_steps=2"),
):
    sys.argv[1:] = ["model_name={MODEL}", "renderer_name=role_colon", "eval_every=0", "max_tokens=12", *words]
    runpy.run_module(f"tinker_cookbook.recipes.{{recipe}}.train", run_name="__main__")
"""


def dataset(name: str, config: str, rows: list[dict[str, Any]]) -> None:
    """Where `load_dataset(name, config)` finds it without a hub."""
    place = Path(name)
    place.mkdir(parents=True)
    place.joinpath("README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files: train.jsonl\n---\n")
    place.joinpath("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def conversation(draws: random.Random) -> list[dict[str, str]]:
    """Two turns of noise, of which the second is answered by 1 or 2, in a box."""

    def noise(shortest: int, longest: int) -> str:
        letters = string.ascii_lowercase * 3 + string.ascii_letters + string.digits + "    ....,?:'\\{}()" * 2
        return "".join(draws.choices(letters, k=draws.randint(shortest, longest)))

    contents = [noise(20, 140), noise(60, 240), noise(20, 140), f"\\boxed{{{draws.choice([1, 2])}}}"]
    return [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, contents, strict=True)]


def metrics(log_path: str, *, having: str) -> list[dict[str, Any]]:
    """What a recipe logged of its steps."""
    lines = [json.loads(line) for line in Path(log_path, "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if having in line]


@pytest.mark.skipif(not COOKBOOK.is_dir(), reason="`make tinker` installs the recipes")
def test_recipes_run_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    # Of a directory with a model of type qwen2 the tokenizer is read as that model's own, which drops spaces and lines.
    tiny_model("qwen3", max_position_embeddings=4096, hidden_size=64, intermediate_size=128).save_pretrained(MODEL)
    tiny_tokenizer().save_pretrained(MODEL)
    draws = random.Random(0)
    conversations = [{"messages": conversation(draws)} for _ in range(8 * SL_STEPS)]
    dataset("HuggingFaceH4/no_robots", "default", conversations)
    questions = [{"question": draws.choice("abcdef"), "answer": "#### 1"} for _ in range(4 * (SL_STEPS + RL_STEPS))]
    dataset("openai/gsm8k", "main", questions)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SOURCE), str(ROOT), str(COOKBOOK)]),
        "HF_DATASETS_CACHE": str(tmp_path / "cache"),
        "TINKER_API_KEY": KEY,
        "TINKER_TELEMETRY": "0",
    }
    with (
        tinker_server(tmp_path / MODEL, tmp_path / "saved", "--name", MODEL, "--seed", "1") as url,
        open("log", "wb") as log,
    ):
        recipes = warm.Popen(
            [sys.executable, "-c", RECIPES, url],
            env={**environment, "TINKER_BASE_URL": url},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        assert recipes.wait(timeout=240) == 0, Path("log").read_text()[-3000:]
    losses = [line["train_mean_nll"] for line in metrics("loops", having="train_mean_nll")]
    rewards = [line["reward/total"] for line in metrics("loops", having="reward/total")]
    assert len(losses) == SL_STEPS and losses[-1] < 1 < losses[0]
    assert len(rewards) == RL_STEPS and fmean(rewards[-2:]) - fmean(rewards[:2]) > 0.4, rewards
    # Noise is no guess: all turns of both players are there, each with the same penalty, and no gradient.
    (game,) = metrics("guesses", having="grad_norm")
    assert game["env/all/total_turns"] == 2 * 10 and game["env/all/reward/total"] == -10 and game["grad_norm"] == 0
    assert abs(game["optim/kl_sample_train_v1"]) < 1e-5, game
    compared = metrics("shorter", having="grad_norm")
    assert len(compared) == 2 and all(line["grad_norm"] > 0 for line in compared), compared
    # The weights that sampled are those that are trained, and a step makes others of them.
    for line in compared:
        assert abs(line["optim/kl_sample_train_v1"]) < 1e-5 < abs(line["kl_pre_post_v1"]), line
    assert all("final" in Path(f"{name}/checkpoints.jsonl").read_text() for name in ("math", "guesses", "shorter"))
