from __future__ import annotations

import shutil

import pytest

from tests.unit.plugins.dialects.shell.bash import assert_only_bash_knows, words_of_bash, words_read

SCRIPTS = {
    "a branch": 'A=gpu\nif [ "$A" = npu ]; then B=1; elif [[ $A == g* ]]; then B=2; else B=3; fi\nrun $B',
    "a branch in a branch": 'if [ -z "$NONE" ]; then\n  if [ 2 -gt 3 ]; then B=1\n  else B=2\n  fi\nfi\nrun $B',
    "a case": 'A=b\ncase "$A" in\n  a|b)\n    B=1\n    ;;\n  *) B=2 ;;\nesac\nrun $B',
    "the rest of a case": "A=z\ncase $A in a) B=1;; b | c) B=2;; *) B=3;; esac\nrun $B",
    "a condition before a command": 'A=1\n[ -z "$A" ] && A=2\n[ -n "$A" ] && B=3\nrun $A $B',
    "an alternative": '[ -n "$NONE" ] || A=2\nrun $A',
    "no arguments": "if [ $# -lt 1 ]; then A=none; fi\nrun $A",
    "a branch with a command": "if [ 1 -eq 2 ]; then run a; else run b; fi",
    "a loop that is not entered": "while [[ $# -gt 0 ]]; do A=$1; shift; done\nrun ${A:-none}",
    "conditions that are joined": (
        "A=1\nif [ $A = 1 ] && { [ $A = 2 ] || [ $A = 1 ]; }; then B=1; else B=2; fi\n"
        "if [ $A = 2 ] || [ $A = 3 ]; then C=1; elif [ $A = 2 ] && [ $A = 1 ]; then C=2; else C=3; fi\n"
        "if [ $A = 2 ] && grep -q x y; then D=1; else D=2; fi\nrun $B $C $D"
    ),
    "options that are not given": 'while getopts "a:" o; do case $o in a) A=$OPTARG;; esac; done\nrun ${A:-1}',
    "not": "if ! [ 1 = 1 ]; then A=1; else A=2; fi\nrun $A",
    "a condition with a pattern": "A=Qwen3-8B\nif [[ $A =~ 8B ]]; then B=1; fi\n[[ $A =~ ^8B ]] && B=2\nrun $B",
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is what it is compared with")
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_words_are_those_of_bash(script: str):
    assert words_read(script) == words_of_bash(script)


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("if grep -q x f; then A=1; else A=2; fi\nrun $A", "$A"),
        ("for A in 1 2; do run $A; done", "$A"),
        ("A=1\nif [ $RANK = 0 ]; then A=2; fi\nrun $A", "$A"),
        ("A=1\nif grep -q x f; then A=2; fi\nrun $((A * 2))", "$((A * 2))"),
        ('A=(a)\nif grep -q x f; then A+=(b); fi\nrun "${A[@]}"', "${A[@]}"),
        ("A=1\n[[ $A -gt 2 || -z $NONE ]] && A=2\nrun $A", "$A"),
    ],
)
def test_what_only_bash_can_know_stays_with_its_name(script: str, name: str):
    assert_only_bash_knows(script, name)
