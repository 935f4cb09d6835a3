from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lachesis.plugins.dialects.shell.interpreter import commands
from tests.unit.plugins.dialects.shell.bash import assert_only_bash_knows, words_of_bash, words_read

SCRIPTS = {
    "a variable": 'A=1\nrun x=$A y="${A}2"',
    "a default": "run ${A:-15} ${SET:-no} ${EMPTY-x}",
    "a default of a variable": 'run "${A:-$HOME/data}"',
    "a default that is set": ": ${A:=3}\nrun $A",
    "an array": 'A=(a.b=1 "c d")\nA+=(e)\nrun "${A[@]}" ${A[0]}',
    "an element by its number": 'A=(a "b c" d)\nN=2\nrun ${A[1]} "${A[1]}" ${A[N]} ${A[$N]} ${A[0]}',
    "an associative array": 'declare -A A=([small]=1e-6 [big]="x y")\nB=big\nrun ${A[small]} "${A[$B]}"',
    "an empty array": 'A=()\nB=(b)\nrun a "${A[@]}" ${A[@]} "${B[@]}" "x${A[@]}"',
    "arguments of the script": 'run a "$@" $@ b',
    "arithmetic": "A=8\nrun $((A * 2 + 1)) $(( (A - 1) / 2 )) $((7 % 4))",
    "an unquoted text of two words": 'A="x y"\nrun $A "$A"',
    "export": "export A=2 B=3\nrun $A $B",
    "appended": "A=x\nA+=y\nrun $A",
    "an empty array by its name": 'A=()\nrun a "$A" ${A} b',
    "arithmetic with defaults": "B=3\nrun $(( ${A:-8} * $B + B )) $(expr 16 / $B) $(( (B) ))",
    "an argument without a value": "A=$1\nB=${1:-b}\nrun ${A:-x} $B",
    "a variable's variable": 'A=B\nB="x y"\nrun "${!A}"',
    "parts of a value": (
        "A=org/Qwen2.5-7B-it.json\nS=.json\nrun ${A##*/} ${A#*/} ${A%-*} ${A%%-*} ${A%$S} ${A%.json} ${A#none} "
        "${A:4:3} ${A:4} ${A^^} ${A,,} ${A/i/I} ${A//[0-9]/n} ${A//./} ${A/none/x}"
    ),
    "lengths": 'A=abc\nB=(x "y z")\nC=()\nrun ${#A} ${#B[@]} ${#C[@]} ${#B[*]} $#',
    "parts of paths": (
        'A=/a/b/c.sh\nrun $(dirname $A) $(basename "$A") $(basename $A .sh) $(cd /usr/bin/.. && pwd) $(dirname x) '
        '"$( cd "$(dirname "/usr/bin/x")/.." >/dev/null 2>&1 && pwd )" $(realpath -m /no/such/../x) $(readlink -f /)'
    ),
    "a variable that is unset": "A=1\nB=(1 2)\nunset A B\nB+=(3)\nrun ${A:-2} ${#B[@]}",
    "a slice of an array": 'A=(a b c d)\nB=("${A[@]:1:2}")\nf() { run "${@:2:1}"; }\nf x y z\nrun ${B[0]} "${A[@]%d}"',
    "the last element, and one that is set": "A=(1 2)\nA[1]=5\ndeclare -A B\nB[x]=6\nrun ${A[-1]} ${B[x]} ${A[@]}",
    "numbers to base 8": "run $((010)) $((8 + 0))",
    "an old form of a command's output": "A=`expr 2 \\* 4`\nrun $A `echo b c`",
    "a home directory": "A=~/a\nrun $A ~/b c=~/d '~/e'",
    "arrays that may be empty": 'A=()\nB=(b "c d")\nrun ${A[@]+"${A[@]}"} ${B[@]+"${B[@]}"} "${@:-x}" ${A[@]:-y}',
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is what it is compared with")
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_words_are_those_of_bash(script: str):
    assert words_read(script) == words_of_bash(script)


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("run $MODEL", "$MODEL"),
        ("run a=${MODEL}", "${MODEL}"),
        ("run $(nproc)", "$(nproc)"),
        ("run `nproc`", "`nproc`"),
        ("run ${A%.json}", "${A%.json}"),
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
        ("declare -i A=1+2\nrun $A", "$A"),
    ],
)
def test_what_only_bash_can_know_stays_with_its_name(script: str, name: str):
    assert_only_bash_knows(script, name)


def test_the_working_directory_and_words_for_set_variables():
    script = 'A=1\nE=\nrun "$(pwd)/x" "${A:+set}" "${E:+set}" "${E+set}" ${NONE:+set}'
    assert commands(script, environment={"PWD": "/there"}) == [["run", "/there/x", "set", "", "set"]]


def test_the_folder_of_the_script_is_known():
    script = 'D="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\nrun "$D/../data" $0 $(dirname $(realpath $0))'
    found = commands(script, environment={"PWD": "/w"}, script=Path("/w/scripts/a.sh"))
    assert found == [["run", "/w/scripts/../data", "/w/scripts/a.sh", "/w/scripts"]]
    relative = commands(script, environment={"PWD": "/w"}, script=Path("scripts/a.sh"))
    assert relative == [["run", "/w/scripts/../data", "scripts/a.sh", "/w/scripts"]]
