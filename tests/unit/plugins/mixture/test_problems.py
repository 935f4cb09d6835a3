"""The list of sources in a file: its defaults, its paths, and problems in its lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from lachesis.common.errors import ConfigError
from lachesis.config.custom import custom_parts
from lachesis.config.load import dump_config, load_config

FILE = """\
run: {steps: 4}
model: {path: org/model}
sources:
  - name: math
    data: {path: math.jsonl, max_prompt_length: null}
    source: {tools: [tools.add]}
    rewards: {functions: [rewards.exact]}
    algorithm: {advantage: mine.py:centered}
  - name: game
    weight: 2
    source: {kind: steps, environment: game.py:Game}
"""


def written(directory: Path, text: str) -> Path:
    path = directory / "config.yaml"
    path.write_text(text)
    return path


def test_an_entry_has_the_defaults_and_the_paths_of_its_sections(tmp_path: Path):
    (tmp_path / "rewards.py").touch()
    config = load_config(written(tmp_path, FILE)).config
    math, game = config.sources
    assert math.source.kind == "local" and math.weight == 1.0 and game.weight == 2
    assert math.data.path == str(tmp_path / "math.jsonl")
    assert math.rewards.functions == [f"{tmp_path / 'rewards.py'}:exact"]
    assert game.source.kind == "steps" and game.source.environment == f"{tmp_path / 'game.py'}:Game"
    assert [key for kind, key, _ in custom_parts(config) if kind.name == "advantage"] == [
        "sources[0].algorithm.advantage"
    ]


def test_it_loads_back_equal(tmp_path: Path):
    config = load_config(written(tmp_path, FILE)).config
    assert load_config(written(tmp_path, dump_config(config))).config == config


def test_an_item_can_be_set_from_the_command_line(tmp_path: Path):
    loaded = load_config(written(tmp_path, FILE), overrides=["sources[1].weight=5", "sources[1].data.shuffle=false"])
    assert (loaded.config.sources[1].weight, loaded.config.sources[1].data.shuffle) == (5, False)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("path: math.jsonl", "pat: math.jsonl", "sources[0].data.pat (line 5): unknown key; did you mean data.path?"),
        ("tools: [tools.add]", "tools: tools.add", "sources[0].source.tools (line 6): expected a list of"),
        ("name: math", "name: a/b", "sources[0].name (line 4): expected name, got the text 'a/b'"),
        ("weight: 2", "weight: 0", "sources[1].weight (line 10): expected a number > 0, got the number 0"),
        ("kind: steps", "kind: stps", "sources[1].source.kind (line 11)"),
        ("  - name: game\n    weight: 2", "  - weight: 2", "sources[1].name: missing, but required"),
        ("functions: [rewards.exact]", "weights: [1]", "sources[0].rewards.functions (line 7): missing, but required"),
    ],
)
def test_problems_are_told_in_the_lines_of_the_file(tmp_path: Path, old: str, new: str, said: str):
    assert old in FILE
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, FILE.replace(old, new)))
    assert said in caught.value.message
