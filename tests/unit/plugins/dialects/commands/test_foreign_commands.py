"""Commands of other trainers: each is one of ours, as the page of commands has it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from lachesis.common.errors import ConfigError
from lachesis.config.document import parse_document
from lachesis.config.overrides import apply_overrides
from lachesis.plugins.dialects.commands.foreign_commands import PROGRAMS, command_for
from tests.paths import ROOT

ROWS = re.findall(
    r"^\| `([^`]+)` \| `((?:lachesis|torchrun) [^`]+)` \|$", (ROOT / "docs/commands.md").read_text(), re.M
)

MORE = [
    (
        "axolotl train config.yaml --launcher torchrun -- --nproc_per_node=2",
        "torchrun --nproc-per-node 2 -m lachesis train config.yaml",
    ),
    (
        "accelerate launch --num_processes 2 -m axolotl.cli.train config.yaml",
        "torchrun --nproc-per-node 2 -m lachesis train config.yaml",
    ),
    ("accelerate launch -m axolotl.cli.train config.yaml", "lachesis train config.yaml"),
    (
        "trl grpo --config config.yaml --reward_funcs a.b c.d",
        'lachesis train config.yaml \'--set=reward_funcs=["a.b", "c.d"]\'',
    ),
    (
        "trl rloo --config config.yaml --beta 0.1",
        "lachesis train config.yaml --set=beta=0.1 '--set=trl_trainer=\"rloo\"'",
    ),
    (
        "trl grpo --config config.yaml --no_gradient_checkpointing",
        "lachesis train config.yaml --set=gradient_checkpointing=false",
    ),
    (
        "trl vllm-serve --model M --tensor_parallel_size 4 --port 8001",
        "lachesis serve --port 8001 --model M --tensor-parallel-size 4",
    ),
]


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch):
    """Several that are named would be as many processes."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def split(there: str) -> tuple[str, list[str]]:
    words = shlex.split(there)
    if words[0] == "python":
        words = words[2:] if words[1] == "-m" else words[1:]
    return words[0], words[1:]


@pytest.mark.parametrize(("there", "here"), [*ROWS, *MORE])
def test_the_page_says_what_they_become(there: str, here: str):
    assert command_for(*split(there)) == shlex.split(here)


def test_our_own_options_go_through():
    words = ["train", "c.yaml", "--set", "max_steps=2", "--learning-rate", "1e-5", "--smoke", "--set=seed=1"]
    assert command_for("axolotl", words) == [
        *("lachesis", "train", "c.yaml", "--set=learning_rate=1e-5", "--set", "max_steps=2", "--smoke", "--set=seed=1"),
    ]


def test_the_page_has_each_program():
    assert {split(there)[0] for there, _ in ROWS} == set(PROGRAMS)


def test_processes_may_be_in_accelerate_s_file(tmp_path: Path):
    file = tmp_path / "accelerate.yaml"
    file.write_text("num_processes: 4\nmixed_precision: bf16\n")
    words = ["launch", "--config_file", str(file), "-m", "axolotl.cli.train", "c.yaml"]
    assert command_for("accelerate", words)[:3] == ["torchrun", "--nproc-per-node", "4"]


@pytest.mark.parametrize(
    ("words", "processes"),
    [
        ("c.yaml", 2),  # GPUs that the environment names
        ("c.yaml --num-processes 4", 4),
        ("c.yaml --launcher torchrun -- --nproc_per_node=3", 3),
        ("c.yaml --launcher accelerate -- --num_processes 3", 3),
        ("c.yaml --launcher python", 1),
        ("c.yaml --no-accelerate", 1),
    ],
)
def test_how_many_processes_axolotl_starts(words: str, processes: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    start = ["torchrun", "--nproc-per-node", str(processes), "-m"] if processes > 1 else []
    assert command_for("axolotl", ["train", *words.split()]) == [*start, "lachesis", "train", "c.yaml"]
    if words == "c.yaml":
        assert command_for("trl", ["grpo", "--config", *words.split()]) == [*start, "lachesis", "train", "c.yaml"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("launch --num_machines 2 --num_processes 4 -m axolotl.cli.train c.yaml", "only the processes of its machine"),
        ("launch --num_processes many -m axolotl.cli.train c.yaml", "'many' is not a number of processes"),
    ],
)
def test_processes_that_cannot_be_started_are_said(words: str, expected: str):
    with pytest.raises(ConfigError, match=expected):
        command_for("accelerate", words.split())


def test_flags_of_trl_become_a_file():
    words = ["grpo", "--model_name_or_path", "M", "--learning_rate", "1e-6", "--reward_funcs", "a.b", "c.d", "--bf16"]
    command, verb, path = command_for("trl", words)
    assert (command, verb) == ("lachesis", "train")
    try:
        written = yaml.safe_load(Path(path).read_text())
    finally:
        Path(path).unlink()
    assert written == {
        "model_name_or_path": "M", "learning_rate": 1e-6, "reward_funcs": ["a.b", "c.d"], "bf16": True
    }  # fmt: skip


def test_flags_over_a_file_keep_their_kinds():
    words = ["grpo", "--config", "c.yaml", "--lr_scheduler_kwargs", '{"min_lr_rate": 0.1}', "--learning_rate", "1e-6"]
    _, _, config, *settings = command_for("trl", [*words, "--use_vllm", "--no_cuda", "--no_bf16"])
    document = parse_document("seed: 1", name=config)
    apply_overrides(document, [setting.removeprefix("--set=") for setting in settings])
    assert document.data == {
        **{"seed": 1, "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "learning_rate": 1e-6, "use_vllm": True},
        **{"no_cuda": True, "bf16": False},
    }


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("vllm-serve --model M --enforce_eager True", "serve --port 8000 --model M --enforce-eager"),
        ("vllm-serve --model M --enforce_eager False --dtype bf16", "serve --port 8000 --model M --dtype bf16"),
        ("vllm-serve --trust_remote_code --model M", "serve --port 8000 --trust-remote-code --model M"),
        ("grpo --config c.yaml --num_processes 4", "-m lachesis train c.yaml"),
    ],
)
def test_commands_of_trl(words: str, expected: str):
    assert shlex.join(command_for("trl", shlex.split(words))).endswith(expected)


@pytest.mark.parametrize("program", ["src/open_r1/grpo.py", "trl/scripts/grpo.py", "-m trl.scripts.grpo"])
def test_scripts_of_grpo_take_the_flags_of_trl(program: str):
    words = ["launch", "--num_processes=2", *program.split(), "--config", "c.yaml", "--beta", "0.1"]
    start = ["torchrun", "--nproc-per-node", "2", "-m", "lachesis", "train", "c.yaml"]
    assert command_for("accelerate", words) == [*start, "--set=beta=0.1"]


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("axolotl", ["inference", "c.yaml"]),
        ("axolotl", ["train"]),
        ("trl", ["sft", "--model", "M"]),
        ("accelerate", ["config"]),
        ("accelerate", ["launch", "-m", "somebody.train"]),
        ("accelerate", ["launch", "train_grpo.py"]),
        ("axolotl", []),
    ],
)
def test_what_nothing_here_does_is_said(program: str, words: list[str]):
    with pytest.raises(ConfigError) as raised:
        command_for(program, words)
    assert raised.value.remedy
