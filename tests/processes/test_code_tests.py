from __future__ import annotations

import base64
import json
import os
import pickle
import zlib

import pytest

from lachesis.plugins.sandbox.rewards.code_tests import InputTest, cases_of, same_output
from lachesis.plugins.sandbox.rewards.execution import run_tests

SQUARE = "def square(x): return x * x"
SCRIPT = "print(int(input()) ** 2)"
METHOD = "class Solution:\n    def square(self, x): return [x * x]"
FUNCTIONS = """from solution import square

def test_small():
    assert square(2) == 4

def test_large():
    assert square(9) == 80
"""
METHODS = """class TestIt:
    def setUp(self): self.n = 3
    def test_it(self): assert square(self.n) == 9
"""
CALLS = [{"input": "3", "output": "9", "testtype": "functional"}]


def packed(value: object) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


ROWS = {
    "statements": ({"test_cases": ["assert square(2) == 4", "assert square(3) == 8"]}, SQUARE, 1),
    "mbpp": ({"test_list": ["assert square(2) == four"], "test_imports": ["four = 4"]}, SQUARE, 1),
    "mbpp with a setup": ({"test_list": ["assert square(2) == 4"], "test_setup_code": "import math"}, SQUARE, 1),
    "humaneval": ({"test": "def check(candidate):\n    assert candidate(3) == 9", "entry_point": "square"}, SQUARE, 1),
    "kodcode": ({"test": FUNCTIONS}, SQUARE, 1),
    "a class of tests": ({"test": METHODS}, SQUARE, 1),
    "apps": ({"input_output": json.dumps({"inputs": ["2\n", ["3"]], "outputs": ["4\n", ["9"]]})}, SCRIPT, 2),
    "apps, calls": ({"input_output": {"fn_name": "square", "inputs": [[2], [3]], "outputs": [[4], 9]}}, SQUARE, 2),
    "a method": ({"input_output": {"fn_name": "square", "inputs": [[2]], "outputs": [[4]]}}, METHOD, 1),
    "livecodebench": ({"public_test_cases": '[{"input": "2", "output": "4", "testtype": "stdin"}]'}, SCRIPT, 1),
    "livecodebench, packed": (
        {"private_test_cases": packed(json.dumps(CALLS)), "metadata": '{"func_name": "square"}'},
        SQUARE,
        1,
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_tests_of_each_form_pass_where_the_code_is_right(name: str):
    row, code, passing = ROWS[name]
    assert run_tests(code, cases_of(row), time_limit_s=60) == passing


def test_no_tests_are_none():
    assert cases_of({"test_cases": None, "test": "", "input_output": "", "public_test_cases": ""}) == cases_of({}) == []


def test_a_packed_object_is_not_made():
    class Harm:
        def __reduce__(self):
            return os.getcwd, ()

    with pytest.raises(ValueError, match="which is not a string"):
        cases_of({"private_test_cases": packed(Harm())})


@pytest.mark.parametrize(
    ("found", "same"), [("1 2\n3\n", True), ("1.0 2  \n3", True), ("1 2 3", False), ("1 2", False), ("a\nb", False)]
)
def test_outputs_are_compared_by_line(found: str, same: bool):
    assert same_output(found, "1 2\n3") is same


def test_cases_may_be_inputs():
    assert cases_of({"test_cases": [{"input": 1, "output": 2}]}) == [InputTest("1", "2")]
