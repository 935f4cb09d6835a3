from __future__ import annotations

import pytest

from lachesis.common.errors import ConfigError
from lachesis.config.init import init
from lachesis.config.load import load_config
from lachesis.config.rules import check
from lachesis.plan.plan import plan


def test_what_is_written_is_a_configuration_with_nothing_to_complain_about(tmp_path):
    files = init(tmp_path / "new" / "first")
    assert [path.name for path in files] == ["config.yaml", "rewards.py", "model.py", "train.jsonl", "eval.jsonl"]
    config = load_config(files[0]).config
    assert [finding for finding in check(config) if finding.level != "note"] == []
    assert config.run.setup == f"{tmp_path}/new/first/model.py:prepare"
    assert plan(config, device="cpu").batches.problems == 90


def test_the_comments_of_the_configuration_name_keys_that_exist(tmp_path):
    path, *_ = init(tmp_path)
    text = path.read_text()
    for line in ("# adapter: ", "# engine: ", "# bridge: "):
        assert line in text
        path.write_text(text.replace(line, line.removeprefix("# ")))
        load_config(path)


@pytest.mark.parametrize("name", ["config.yaml", "rewards.py", "train.jsonl"])
def test_nothing_is_overwritten(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match=rf"{name} would be overwritten -> choose another directory"):
        init(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_a_directory_that_is_a_file(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        init(tmp_path / "x" / "y")
