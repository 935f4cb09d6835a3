from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lachesis.plugins.dialects.shell.interpreter import commands
from lachesis.plugins.dialects.shell.splitting import readable
from tests.unit.plugins.dialects.shell.bash import assert_only_bash_knows, words_of_bash, words_read

SCRIPTS = {
    "a text that is a command": "A=1\nCMD='run x '$A\neval $CMD\neval \"run b\"",
    "a function": 'f() {\n  local A=$1 C=${2:-x}\n  run $A $C $# "${@:2}" "$@"\n}\nf 1\nf 2 \'b c\' d',
    "a function with shift": 'function f {\n  run $1\n  shift\n  run $1 "$@"\n}\nA=1\nf $A b c',
    "a function that is not called": "f() { run a; }\ng () { run b; }\ng",
    "a function before its variables": "A=1\nf()\n{\n  run $A\n}\nA=2\nf",
    "arguments that are set": "set -- a b\nrun $1 $2 $#",
    "an assignment before a command": "A=1\nA=2 true\nA=3 run $A\nf() { run $A; }\nA=4 f",
    "a shell of its own": "A=1\n(A=2; run $A)\nrun $A\n(\n  A=3\n  (A=4)\n  run $A\n)\nrun $A",
    "a command in brackets": "(true && run a b=c)\nrun $(echo d)",
    "assignments in a pipe and behind": "A=1\ntrue | A=2\nA=3 &\nrun $A",
    "a variable of a function alone": "A=1\nf() { local A=2 B; B=3; C=4; run $A; }\nf\nrun $A ${B:-none} $C",
    "the end of a function": "A=1\nf() { A=2; return 0; A=3; }\nf\nrun $A",
    "the end of a script": "run a\nexit 0\nrun b",
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is what it is compared with")
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_words_are_those_of_bash(script: str):
    assert words_read(script) == words_of_bash(script)


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("f() { if grep -q x f; then shift; fi; run $1; }\nf a b", "$1"),
    ],
)
def test_what_only_bash_can_know_stays_with_its_name(script: str, name: str):
    assert_only_bash_knows(script, name)


def test_the_commands_of_another_bash_are_read():
    script = "M=m\nsrun --nodes=1 bash -c \"cd /x && run a \\\n  --b $M\"\nsh -lc 'run c'"
    found = [words for words in commands(script, environment={}) if words[0] == "run"]
    assert found == [["run", "a", "--b", "m"], ["run", "c"]]


def test_a_file_that_the_script_reads_is_read(tmp_path: Path):
    (tmp_path / "env.sh").write_text('source ./more.sh\nMODEL=m\nD=$(dirname "${BASH_SOURCE[0]}")\n')
    (tmp_path / "more.sh").write_text(". ./env.sh\nSTEPS=9\n")
    found = commands("source ./env.sh\nrun $MODEL $STEPS $D", environment={}, script=tmp_path / "a.sh")
    assert found == [["run", "m", "9", str(tmp_path)]]


def test_a_missing_file_that_the_script_reads_is_named_beside_what_it_may_set(tmp_path: Path):
    (found,) = commands("source ./env.sh\nA=1\nrun $A $MODEL", environment={}, script=tmp_path / "a.sh")
    assert [readable(word) for word in found] == ["run", "1", "$MODEL (set in ./env.sh? That file is not here)"]
