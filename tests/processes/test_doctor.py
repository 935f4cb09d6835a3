"""The wall that code of a model meets here, tried as the doctor tries it."""

from __future__ import annotations

import pytest

from lachesis.plugins.checks.doctor import (
    Check,
    inspect_sandbox,
)
from lachesis.plugins.sandbox import choice, escapes
from lachesis.plugins.sandbox.choice import VARIABLE
from lachesis.plugins.sandbox.escapes import Attempt


def by_subject(checks: list[Check]) -> dict[str, Check]:
    return {one.subject: one for one in checks}


class TestSandbox:
    def test_the_wall_and_ten_escapes_are_told(self):
        checks = by_subject(inspect_sandbox())
        assert checks["sandbox"].message.endswith("10 of 10 escapes blocked")
        assert len(checks) == 11
        assert not any(check.failed for check in checks.values())

    def test_without_a_wall_it_says_what_to_install_and_fails_nothing(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(choice, "_AUTOMATIC", ("docker",))
        monkeypatch.setenv("PATH", "/nowhere")
        (check,) = inspect_sandbox()
        assert check.message.startswith("none: no sandbox works here")
        assert "allow user namespaces" in check.message
        assert not check.failed

    def test_what_holds_nothing_fails(self, monkeypatch: pytest.MonkeyPatch):
        attempts = [Attempt("read files", held=False, detail="read /etc/shadow"), Attempt("use the network", held=True)]
        monkeypatch.setattr(escapes, "try_escapes", lambda sandbox: attempts)
        checks = by_subject(inspect_sandbox())
        assert checks["sandbox"].failed
        assert (checks["read files"].failed, checks["use the network"].failed) == (True, False)
        assert "read /etc/shadow" in checks["read files"].message

    def test_none_is_not_tried(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv(VARIABLE, "none")
        assert [check.message for check in inspect_sandbox()] == [
            "none, because LACHESIS_SANDBOX says so: the model's code can do whatever you can"
        ]
