from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path

import pytest

from lachesis.common.errors import ConfigError
from lachesis.plugins.dialects.shell import commands, readable, unknown_in

HOME = {"HOME": "/home/me", "SET": "from outside"}
SCRIPTS = {
    "a variable": 'A=1\nrun x=$A y="${A}2"',
    "quotes": """A='$B "x"'\nrun "$A" 'a b' "a \\"b\\"" a\\ b""",
    "a default": "run ${A:-15} ${SET:-no} ${EMPTY-x}",
    "a default of a variable": 'run "${A:-$HOME/data}"',
    "a default that is set": ": ${A:=3}\nrun $A",
    "continuation": "run a \\\n  b \\\n  c",
    "an array": 'A=(a.b=1 "c d")\nA+=(e)\nrun "${A[@]}" ${A[0]}',
    "an element by its number": 'A=(a "b c" d)\nN=2\nrun ${A[1]} "${A[1]}" ${A[N]} ${A[$N]} ${A[0]}',
    "an associative array": 'declare -A A=([small]=1e-6 [big]="x y")\nB=big\nrun ${A[small]} "${A[$B]}"',
    "an empty array": 'A=()\nB=(b)\nrun a "${A[@]}" ${A[@]} "${B[@]}" "x${A[@]}"',
    "an array with comments": 'A=(\n  a=1  # one\n  # nothing\n  b=2\n)\nrun "${A[@]}"',
    "arguments of the script": 'run a "$@" $@ b',
    "arithmetic": "A=8\nrun $((A * 2 + 1)) $(( (A - 1) / 2 )) $((7 % 4))",
    "an unquoted text of two words": 'A="x y"\nrun $A "$A"',
    "comments": "run a # b\n# run c",
    "redirections": "run a > /dev/null 2>&1 b",
    "a list in quotes": """A=/x\nB="['$A', '$A/y']"\nrun files="$B\"""",
    "export": "export A=2 B=3\nrun $A $B",
    "appended": "A=x\nA+=y\nrun $A",
    "a branch": 'A=gpu\nif [ "$A" = npu ]; then B=1; elif [[ $A == g* ]]; then B=2; else B=3; fi\nrun $B',
    "a branch in a branch": 'if [ -z "$NONE" ]; then\n  if [ 2 -gt 3 ]; then B=1\n  else B=2\n  fi\nfi\nrun $B',
    "a case": 'A=b\ncase "$A" in\n  a|b)\n    B=1\n    ;;\n  *) B=2 ;;\nesac\nrun $B',
    "the rest of a case": "A=z\ncase $A in a) B=1;; b | c) B=2;; *) B=3;; esac\nrun $B",
    "a condition before a command": 'A=1\n[ -z "$A" ] && A=2\n[ -n "$A" ] && B=3\nrun $A $B',
    "an alternative": '[ -n "$NONE" ] || A=2\nrun $A',
    "no arguments": "if [ $# -lt 1 ]; then A=none; fi\nrun $A",
    "a branch with a command": "if [ 1 -eq 2 ]; then run a; else run b; fi",
    "a text that is a command": "A=1\nCMD='run x '$A\neval $CMD\neval \"run b\"",
    "a heredoc in a variable": "A=1\nread -r -d '' B <<EOF\nx$A y\nz\nEOF\nrun $B",
    "a text as input, and streams by their numbers": "read A <<< 'x'\nrun a 2>> /dev/null 0< /dev/null b\nrun c",
    "a comment between continued lines": "run a \\\n  # run b \\\nrun c",
    "a comment between an array's continued lines": "A=(a \\\n  # b (and 'c \\\n  d)\nrun ${A[@]}",
    "an array with a sharp and a bracket in quotes": 'A=(\'a #b\' "c)" d)\nrun "${A[@]}"',
    "an empty array by its name": 'A=()\nrun a "$A" ${A} b',
    "a space behind a backslash": "run a \\ \nrun b",
    "a word over two lines": 'run a\\\nb "c\\\nd" \'e\\\nf\' "\\d\\$"',
    "arithmetic with defaults": "B=3\nrun $(( ${A:-8} * $B + B )) $(expr 16 / $B) $(( (B) ))",
    "a function": 'f() {\n  local A=$1 C=${2:-x}\n  run $A $C $# "${@:2}" "$@"\n}\nf 1\nf 2 \'b c\' d',
    "a function with shift": 'function f {\n  run $1\n  shift\n  run $1 "$@"\n}\nA=1\nf $A b c',
    "a function that is not called": "f() { run a; }\ng () { run b; }\ng",
    "a function before its variables": "A=1\nf()\n{\n  run $A\n}\nA=2\nf",
    "an argument without a value": "A=$1\nB=${1:-b}\nrun ${A:-x} $B",
    "arguments that are set": "set -- a b\nrun $1 $2 $#",
    "a loop that is not entered": "while [[ $# -gt 0 ]]; do A=$1; shift; done\nrun ${A:-none}",
    "a variable's variable": 'A=B\nB="x y"\nrun "${!A}"',
    "conditions that are joined": (
        "A=1\nif [ $A = 1 ] && { [ $A = 2 ] || [ $A = 1 ]; }; then B=1; else B=2; fi\n"
        "if [ $A = 2 ] || [ $A = 3 ]; then C=1; elif [ $A = 2 ] && [ $A = 1 ]; then C=2; else C=3; fi\n"
        "if [ $A = 2 ] && grep -q x y; then D=1; else D=2; fi\nrun $B $C $D"
    ),
    "parts of a value": (
        "A=org/Qwen2.5-7B-it.json\nS=.json\nrun ${A##*/} ${A#*/} ${A%-*} ${A%%-*} ${A%$S} ${A%.json} ${A#none} "
        "${A:4:3} ${A:4} ${A^^} ${A,,} ${A/i/I} ${A//[0-9]/n} ${A//./} ${A/none/x}"
    ),
    "lengths": 'A=abc\nB=(x "y z")\nC=()\nrun ${#A} ${#B[@]} ${#C[@]} ${#B[*]} $#',
    "parts of paths": (
        'A=/a/b/c.sh\nrun $(dirname $A) $(basename "$A") $(basename $A .sh) $(cd /usr/bin/.. && pwd) $(dirname x) '
        '"$( cd "$(dirname "/usr/bin/x")/.." >/dev/null 2>&1 && pwd )" $(realpath -m /no/such/../x) $(readlink -f /)'
    ),
    "options that are not given": 'while getopts "a:" o; do case $o in a) A=$OPTARG;; esac; done\nrun ${A:-1}',
    "not": "if ! [ 1 = 1 ]; then A=1; else A=2; fi\nrun $A",
    "an assignment before a command": "A=1\nA=2 true\nA=3 run $A\nf() { run $A; }\nA=4 f",
    "a variable that is unset": "A=1\nB=(1 2)\nunset A B\nB+=(3)\nrun ${A:-2} ${#B[@]}",
    "a shell of its own": "A=1\n(A=2; run $A)\nrun $A\n(\n  A=3\n  (A=4)\n  run $A\n)\nrun $A",
    "a command in brackets": "(true && run a b=c)\nrun $(echo d)",
    "assignments in a pipe and behind": "A=1\ntrue | A=2\nA=3 &\nrun $A",
    "a variable of a function alone": "A=1\nf() { local A=2 B; B=3; C=4; run $A; }\nf\nrun $A ${B:-none} $C",
    "the end of a function": "A=1\nf() { A=2; return 0; A=3; }\nf\nrun $A",
    "the end of a script": "run a\nexit 0\nrun b",
    "a slice of an array": 'A=(a b c d)\nB=("${A[@]:1:2}")\nf() { run "${@:2:1}"; }\nf x y z\nrun ${B[0]} "${A[@]%d}"',
    "the last element, and one that is set": "A=(1 2)\nA[1]=5\ndeclare -A B\nB[x]=6\nrun ${A[-1]} ${B[x]} ${A[@]}",
    "numbers to base 8": "run $((010)) $((8 + 0))",
    "an old form of a command's output": "A=`expr 2 \\* 4`\nrun $A `echo b c`",
    "quotes with a dollar sign": "run $'a b' 'c'$'d'",
    "a home directory": "A=~/a\nrun $A ~/b c=~/d '~/e'",
    "arrays that may be empty": 'A=()\nB=(b "c d")\nrun ${A[@]+"${A[@]}"} ${B[@]+"${B[@]}"} "${@:-x}" ${A[@]:-y}',
    "a condition with a pattern": "A=Qwen3-8B\nif [[ $A =~ 8B ]]; then B=1; fi\n[[ $A =~ ^8B ]] && B=2\nrun $B",
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is what it is compared with")
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_words_are_those_of_bash(script: str):
    prints = 'run() { printf "%s\\0" "$@" >&3; }\nexec 3>&1\n'
    said = subprocess.run(["bash", "-c", prints + script], env=HOME, capture_output=True, check=True, timeout=20)
    found = [words for words in commands(script, environment=HOME) if words[0] == "run"]
    assert [word for words in found for word in words[1:]] == said.stdout.decode().split("\0")[:-1]


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("run $MODEL", "$MODEL"),
        ("run a=${MODEL}", "${MODEL}"),
        ("run $(nproc)", "$(nproc)"),
        ("run `nproc`", "`nproc`"),
        ("if grep -q x f; then A=1; else A=2; fi\nrun $A", "$A"),
        ("for A in 1 2; do run $A; done", "$A"),
        ("A=1\nif [ $RANK = 0 ]; then A=2; fi\nrun $A", "$A"),
        ("run ${A%.json}", "${A%.json}"),
        ("A=1\nif grep -q x f; then A=2; fi\nrun $((A * 2))", "$((A * 2))"),
        ('A=(a)\nif grep -q x f; then A+=(b); fi\nrun "${A[@]}"', "${A[@]}"),
        ("f() { if grep -q x f; then shift; fi; run $1; }\nf a b", "$1"),
        ("declare -A A=([b]=1)\nrun ${A[c]}", "${A[c]}"),
        ("A=(a)\nrun ${A[3]}", "${A[3]}"),
        ("run ${#A[@]}", "${#A[@]}"),
        ("A=abc\nrun ${A:B}", "${A:B}"),
        ("A=abc\nrun ${A@Q}", "${A@Q}"),
        ("run $(dirname $A)", "$(dirname $A)"),
        ("run $(cd x && ls)", "$(cd x && ls)"),
        ("run $(basename a | tr a b)", "$(basename a | tr a b)"),
        ("run $(dirname a; pwd)", "$(dirname a; pwd)"),
        ("A=1\nread -r A <<< 2\nrun $A", "$A"),
        ("A=1\nprintf -v A 2\nrun $A", "$A"),
        ("A=1\n((A *= 2))\nrun $A", "$A"),
        ("A=1\n(( A++ ))\nrun $A", "$A"),
        ("A=1\nlet A=A*2\nrun $A", "$A"),
        ("A=1\n[[ $A -gt 2 || -z $NONE ]] && A=2\nrun $A", "$A"),
        ("declare -i A=1+2\nrun $A", "$A"),
    ],
)
def test_what_only_bash_can_know_stays_with_its_name(script: str, name: str):
    word = next(words for words in commands(script, environment={}) if "run" in words)[-1]
    assert unknown_in(word) == name and name in readable(word)


def test_here_documents_and_pipes_end_a_command():
    script = "cat > f <<EOF\nrun 'open\nEOF\nrun a | tee log && run b &\nrun c; run d"
    assert [words for words in commands(script, environment={}) if words[0] == "run"] == [
        ["run", "a"], ["run", "b"], ["run", "c"], ["run", "d"],
    ]  # fmt: skip


def test_a_quotation_that_is_not_closed_is_an_error():
    with pytest.raises(ConfigError, match='a quotation with " is not closed'):
        commands('run "a', environment={})


@pytest.mark.parametrize(
    "text", ["$" * 20000, "${" * 5000, "(" * 20000, "a=(" * 3000, '"$(' * 3000 + '"', "\\" * 20001]
)
def test_any_text_is_read_in_time(text: str):
    with contextlib.suppress(ConfigError):
        commands(text, environment={})


def test_the_working_directory_and_words_for_set_variables():
    script = 'A=1\nE=\nrun "$(pwd)/x" "${A:+set}" "${E:+set}" "${E+set}" ${NONE:+set}'
    assert commands(script, environment={"PWD": "/there"}) == [["run", "/there/x", "set", "", "set"]]


def test_the_folder_of_the_script_is_known():
    script = 'D="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\nrun "$D/../data" $0 $(dirname $(realpath $0))'
    found = commands(script, environment={"PWD": "/w"}, script=Path("/w/scripts/a.sh"))
    assert found == [["run", "/w/scripts/../data", "/w/scripts/a.sh", "/w/scripts"]]
    relative = commands(script, environment={"PWD": "/w"}, script=Path("scripts/a.sh"))
    assert relative == [["run", "/w/scripts/../data", "scripts/a.sh", "/w/scripts"]]


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
