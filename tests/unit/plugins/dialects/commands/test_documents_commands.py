"""Every command of the five documents, as it stands there, is one of ours that parses, or none of ours."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lachesis.config.load import load_config
from lachesis.plugins.dialects.commands.foreign_commands import PROGRAMS, command_for
from lachesis.plugins.dialects.commands.scripts import documented_files
from tests.paths import ROOT
from tests.unit.test_docs import check_environment, check_options, check_trainer, commands, words_of

# Those that no trainer brings along.
OTHERS = {"cd", "chmod", "curl", "export", "grep", "netstat", "nvidia-smi", "pip", "pkill", "rm", "tail", "watch"}
OF_PYTHON = {"-c", "json.tool"}
PAGE = ROOT / "docs/commands.md"
WALK = Path(__file__).with_name("documents_commands.txt").read_text(encoding="utf-8")
DOCUMENTS = [
    pytest.param(line, id=f"{number}-{line[:40]}")
    for number, line in enumerate(re.sub(r"\\\n\s*", " ", WALK).splitlines())
    if line and not line.startswith("#")
]
QUICKSTART = ROOT / "tests/unit/config/documents/quickstart.yaml"


def program_of(line: str) -> tuple[str, list[str]]:
    """What is run, under the name that it has in a table of ours, and its words."""
    line = re.sub(r"^(?:[A-Z_0-9]+=\S+ )+| 2>&1", "", line.replace("$MODEL", "model"))
    words = words_of(line)
    if words[0] != "python":
        return words[0], words[1:]
    words = [word for word in words[1:] if word not in ("-u", "-m")]
    return re.sub(r"^(?:example_trainer/)?(vllm_api_server|grpo|run)\.py$", r"example_trainer.\1", words[0]), words[1:]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The directory that `lachesis scripts` writes, and in it the file of Axolotl's page."""
    files = documented_files(tmp_path)
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "config.yaml").write_text(QUICKSTART.read_text())
    monkeypatch.chdir(tmp_path)
    return {str(path.relative_to(tmp_path)) for path in files}


@pytest.mark.parametrize("line", DOCUMENTS)
def test_it_is_a_command_here(line: str, written: set[str], monkeypatch: pytest.MonkeyPatch):
    program, words = program_of(line)
    for name, value in re.findall(r"^(CUDA_VISIBLE_DEVICES)=(\S+)", line):
        monkeypatch.setenv(name, value)
    if program in OTHERS | OF_PYTHON or program.removeprefix("./") in written - set(PROGRAMS):
        assert program != "pip" or "-r" not in words or words[-1] in written
        return
    ours = ["lachesis", "run-api", *words] if program == "run-api" else command_for(program, words)
    command, *rest = ours[ours.index("lachesis") + 1 :]
    processes = int(ours[2]) if ours[0] == "torchrun" else 1
    if command in ("grpo", "run"):
        check_trainer(command, rest, page=PAGE)
    elif command == "env":
        check_environment(rest)
    elif command in ("train", "vllm-serve"):
        loaded = load_config(Path(rest[0]), processes=processes)
        assert loaded.dialect == "axolotl" and not [one for one in loaded.findings if one.level == "problem"]
    else:
        check_options(commands()[command], rest, page=PAGE)
