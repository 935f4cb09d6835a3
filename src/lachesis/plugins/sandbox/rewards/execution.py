"""Runs code of a model, with tests, in the sandbox that this process uses."""

from __future__ import annotations

from collections.abc import Sequence

from lachesis.plugins.sandbox.choice import shared_sandbox
from lachesis.plugins.sandbox.local import LocalSandbox
from lachesis.plugins.sandbox.records import FunctionTests, Limits, Program, SandboxError
from lachesis.plugins.sandbox.rewards.code_tests import CodeTest, InputTest, same_output
from lachesis.rollouts.rewards.functions import Excluded

TIME_LIMIT_S = 10.0
MEMORY_LIMIT_MB = 2048
_SCRATCH_BYTES = 16 << 20


def run_tests(
    code: str,
    tests: Sequence[CodeTest],
    *,
    imports: str = "",
    time_limit_s: float = TIME_LIMIT_S,
    memory_mb: int = MEMORY_LIMIT_MB,
    sandbox: LocalSandbox | None = None,
) -> int:
    """Return how many of the tests pass; none if ``code`` raises or ends the process.

    Args:
        code: of the model.
        tests: statements such as ``assert f(1) == 2``, or inputs with the output that a script has to print.
        imports: those of the reference solution, for names that tests take from there.
        time_limit_s: for all tests together; tests that passed before it count.
        memory_mb: for the code's processes together, in MiB.
        sandbox: by default the one of this process.

    Raises:
        SandboxError: there is no sandbox, or it failed, for which the code is not to blame.
    """
    sandbox = sandbox or shared_sandbox()
    limits = Limits(time_limit_s, time_limit_s, memory_mb << 20, scratch_bytes=_SCRATCH_BYTES)
    code, imports = _text(code), _text(imports)
    calls = tuple(_text(test) for test in tests if isinstance(test, str))
    inputs = [test for test in tests if isinstance(test, InputTest)]
    passed = (
        sum(verdict.passed for verdict in sandbox.test(FunctionTests(code, calls, imports, limits))) if calls else 0
    )
    return passed + _count_inputs(sandbox, code, inputs, limits)


def share_passed(code: str, tests: Sequence[CodeTest], *, imports: str = "") -> float | Excluded:
    """Return the share of the tests that pass, or the reason, not the code's fault, why it could not be judged.

    Raises:
        SandboxError: this machine has no sandbox.
    """
    sandbox = shared_sandbox()
    try:
        return run_tests(code, tests, imports=imports, sandbox=sandbox) / len(tests)
    except SandboxError as error:
        return Excluded("sandbox", str(error))


def _count_inputs(sandbox: LocalSandbox, code: str, tests: Sequence[InputTest], limits: Limits) -> int:
    """Return how often a script prints the expected output, which its process is never given."""
    if not tests:
        return 0
    inputs = [test.stdin.encode("utf-8", "replace") for test in tests]
    outcomes = sandbox.run_each(Program(source=code, limits=limits), inputs)
    return sum(
        outcome.succeeded and same_output(outcome.stdout.decode("utf-8", "replace"), test.stdout)
        for test, outcome in zip(tests, outcomes, strict=False)  # inputs after a limit have no outcome
    )


def _text(text: str) -> str:
    """Return a text without the halves of characters that a model's tokens can leave."""
    return text.encode("utf-8", "replace").decode()
