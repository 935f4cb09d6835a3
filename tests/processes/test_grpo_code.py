from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from lachesis.common.imports import load_function
from lachesis.plugins.sandbox.records import FunctionTests, Outcome, Program, SandboxError, Verdict, Wall
from lachesis.plugins.sandbox.rewards import execution
from lachesis.plugins.sandbox.rewards.execution import run_tests
from lachesis.plugins.sandbox.rewards.grpo_code import code_execution_reward_func, rewards, soft_format_reward_func
from lachesis.plugins.sandbox.rewards.grpo_code.rewards import extract_code
from lachesis.rollouts.rewards.functions import Excluded
from lachesis.rollouts.rewards.rewarder import NamedReward, Rewarder
from tests.unit.rollouts.rewards.test_rewarder import group
from tests.waiting import LONG_S

ADD = "def add(a, b):\n    return a + b\n"


def block(code: str, language: str = "python") -> str:
    return f"Here it is:\n```{language}\n{code}\n```\nDone."


def completions(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def test_answers_count_as_their_share_cubed(monkeypatch):
    asked: list[str] = []

    def run(completions, test_cases):
        asked.extend(completions)
        return [0.5, None]

    monkeypatch.setattr(rewards, "code_execution_reward_func", run)
    texts = completions("<reasoning>r</reasoning>\n<answer>\nx = 1\n</answer>", "no mark")
    assert rewards.answer_execution_reward_func(texts, answers=[["assert x"], []]) == [0.25, None]
    assert asked == ["x = 1", "no mark"]


class TestFormat:
    @pytest.mark.parametrize(
        ("text", "score"),
        [
            (block(ADD), 1.0),
            (block(ADD, ""), 1.0),
            (ADD, 0.5),
            (block("def add(a, b:"), 0.5),
            (block(ADD) + block(ADD), 0.5),
            ("", 0.0),
            ("   ", 0.0),
            ("hello", 0.0),
            ("I cannot do that.", 0.0),
            (block(""), 0.5),
            (block("pass"), 0.5),
            (block("42"), 0.5),
        ],
    )
    def test_half_for_a_block_and_half_for_python(self, text, score):
        assert soft_format_reward_func(completions(text)) == [score]

    def test_the_last_block_of_python_counts(self):
        text = block("x = 1") + block("y = 2") + block("console.log()", "js")
        assert extract_code(text).strip() == "y = 2"


class TestExecution:
    TESTS = ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(1, 1) == 3", "assert add('a', 'b') == 'ab'"]  # noqa: RUF012

    def test_the_share_of_tests_that_pass(self):
        texts = [block(ADD), ADD, block("def add(a, b):\n    return 3"), block("def wrong("), "", block("x = 1")]
        scores = code_execution_reward_func(completions(*texts), test_cases=[self.TESTS] * 6)
        assert scores == [0.75, 0.75, 0.5, 0.0, 0.0, 0.0]

    def test_without_tests_the_names_of_the_solution_have_to_be_there(self):
        texts = [
            block("def add(*x): ..."),
            block("def ad(*x): ..."),
            block("def add(): ...\nraise ValueError"),
            "",
            "x",
        ]
        assert code_execution_reward_func(completions(*texts), response=[ADD] * 5) == [1.0, 0.0, 0.0, 0.0, 0.0]

    def test_with_neither_it_abstains(self):
        assert code_execution_reward_func(completions(ADD), test_cases=[None], response=["no code at all"]) == [None]
        assert code_execution_reward_func(completions(ADD)) == [None]

    def test_tests_that_are_none_are_an_error(self):
        with pytest.raises(ValueError, match="list of strings"):
            code_execution_reward_func(completions(ADD), test_cases=[[3]])

    def test_it_is_found_under_its_name(self):
        assert load_function("grpo_code.code_execution_reward_func") is code_execution_reward_func
        assert load_function("grpo_code.soft_format_reward_func") is soft_format_reward_func


class TestLimits:
    def test_tests_before_an_endless_loop_count(self):
        assert run_tests(ADD, ["assert add(1, 1) == 2", "while True: pass", "assert True"], time_limit_s=5.0) == 1

    @pytest.mark.parametrize(
        "code",
        [
            "raise SystemExit(0)",
            "import os; os._exit(0)",
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
            "x = bytearray(600 * 2**20)",
            "def f(): f()\nf()",
            "input()",
            "open('big', 'wb').write(bytes(2**25))",
        ],
    )
    def test_code_that_ends_early_passes_nothing(self, code):
        assert run_tests(code, ["assert True"], memory_mb=512) == 0

    def test_output_does_no_harm_and_is_no_way_to_pass(self):
        code = "print('passed 0')\nimport os\nos.write(1, b'x' * 100_000)\nos.write(2, b'x' * 100_000)"
        assert run_tests(code, ["assert False", "assert True"]) == 1

    def test_a_test_that_leaves_fails_alone(self):
        assert run_tests("x = 1", ["import sys; sys.exit(0)", "assert x == 1", "y"]) == 1

    def test_the_main_part_of_a_script_is_not_run(self):
        assert run_tests("if __name__ == '__main__':\n    raise ValueError", ["assert True"]) == 1

    def test_it_works_in_a_directory_of_its_own_without_our_environment(self, monkeypatch, tmp_path):
        monkeypatch.setenv("SECRET", "x")
        monkeypatch.chdir(tmp_path)
        code = "import os\nopen('made', 'w').close()\nfree = 'SECRET' not in os.environ"
        assert run_tests(code, ["assert free", "assert os.listdir() == ['made']"]) == 2
        assert not list(tmp_path.iterdir())

    def test_what_it_starts_ends_with_it(self):
        code = "import subprocess\np = subprocess.Popen(['sleep', '600'])\nprint(p.pid)"
        started = time.monotonic()
        assert run_tests(code, ["assert p.poll() is None"], time_limit_s=4 * LONG_S) == 1
        assert time.monotonic() - started < LONG_S

    def test_what_it_starts_in_another_session_is_not_waited_for(self):
        """It has the pipe, and survives the end of the process group."""
        code = "import os, time\nif not os.fork():\n    os.setsid()\n    time.sleep(25)\n    os._exit(0)"
        for last, limit_s in (("while True: pass", 3.0), ("import os; os._exit(0)", 4 * LONG_S)):
            started = time.monotonic()
            assert run_tests(code, ["assert True", last], time_limit_s=limit_s) == 1
            assert time.monotonic() - started < 15


class Broken:
    """A sandbox that fails for code with a mark in it, and for nothing that the code did."""

    wall = Wall("broken", ())

    def run(self, program: Program) -> Outcome:
        raise SandboxError("it fell")

    def run_each(self, program: Program, inputs: Sequence[bytes]) -> list[Outcome]:
        raise SandboxError("it fell")

    def test(self, tests: FunctionTests) -> list[Verdict]:
        if "mark" in tests.code:
            raise SandboxError("it fell")
        return [Verdict(True)] * len(tests.tests)

    def close(self) -> None: ...


class TestSandboxThatFails:
    @pytest.fixture(autouse=True)
    def broken(self, monkeypatch: pytest.MonkeyPatch):
        for module in (execution, rewards):
            monkeypatch.setattr(module, "shared_sandbox", Broken)

    def test_its_completion_is_excluded_and_counted(self):
        counted: dict[str, float] = {}
        texts = (block(ADD), block(ADD + "mark = 1"))
        scores = code_execution_reward_func(
            completions(*texts), test_cases=[["assert add(1, 2) == 3"]] * 2, log_metric=counted.__setitem__
        )
        assert scores == [1.0, Excluded("sandbox")]
        assert counted == {"sandbox_failures": 1}

    def test_no_other_reward_brings_it_back(self):
        given = group("0", block(ADD), block(ADD + "mark = 1"), test_cases=["assert add(1, 2) == 3"])
        functions = [
            NamedReward("format", soft_format_reward_func),
            NamedReward("execution", code_execution_reward_func),
        ]
        rewarder = Rewarder(functions, [0.5, 1.0])
        try:
            scored = rewarder.score([given])
        finally:
            rewarder.close()
        first, second = scored.groups[0].samples
        assert (first.reward, first.rewards) == (1.5, (1.0, 1.0))
        assert (second.reward, second.rewards) == (None, (None, None))
        assert scored.metrics["sandbox_failures"] == 1


class TestFollowUp:
    BANK = (
        "class Bank:\n    def __init__(self, balance=0):\n        self.balance = balance\n\n"
        "    def deposit(self, n):\n        self.balance += n\n        return self.balance\n"
    )
    METHOD = "def withdraw(self, n):\n    self.balance -= n\n    return self.balance\n"
    WHOLE = BANK + "\n    def withdraw(self, n):\n        self.balance -= n\n        return self.balance\n"
    TESTS = ("b = Bank(5)\nb.deposit(2)\nassert b.withdraw(3) == 4", "assert Bank(1).withdraw(1) == 0")

    def score(self, code: str, **columns):
        asked = [{"role": "user", "content": "a bank"}, {"role": "assistant", "content": self.BANK}]
        asked += [{"role": "user", "content": "and withdraw"}]
        return code_execution_reward_func(completions(block(code)), prompts=[asked], **columns)

    @pytest.mark.parametrize(
        ("code", "score"), [(METHOD, 1.0), (WHOLE, 1.0), (BANK, 0.0), ("def withdraw(self, n):\n    return 4", 0.5)]
    )
    def test_the_whole_class_and_the_method_alone_are_tested(self, code, score):
        assert self.score(code, test_cases=[list(self.TESTS)], response=[self.METHOD]) == [score]

    @pytest.mark.parametrize(("code", "score"), [(METHOD, 1.0), (WHOLE, 1.0), (BANK, 0.0), ("x = 1", 0.0)])
    def test_without_tests_either_defines_the_method(self, code, score):
        assert self.score(code, response=[self.METHOD]) == [score]

    def test_what_was_there_before_is_no_answer(self):
        assert self.score("x = 1", response=[self.BANK]) == [0.0]


def test_without_tests_it_warns_once(caplog: pytest.LogCaptureFixture):
    rewards._warn_of_no_tests.cache_clear()
    for _ in range(2):
        assert code_execution_reward_func(completions(ADD), response=[ADD]) == [1.0]
    assert sum("rewards any code that runs" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("fence", ["```python3\n{}```", "```py\r\n{}```", "```Python title=a\n{}```", "```\r\n{}```"])
def test_fences(fence):
    text = fence.format(ADD.replace("\n", "\r\n"))
    assert code_execution_reward_func(completions(text), test_cases=[["assert add(1, 2) == 3"]]) == [1.0]


def test_scripts_are_tested_by_what_they_print():
    code = "n = int(input())\nprint(*(x * x for x in range(n)))\nif __name__ == '__main__':\n    print('end')"
    cases = [{"input": "3\n", "output": "0 1 4\nend"}, {"input": "1", "output": "0.0\nend\n"}]
    cases += [{"input": "2", "output": "0"}]
    assert code_execution_reward_func(completions(block(code)), test_cases=[cases]) == [pytest.approx(2 / 3)]
