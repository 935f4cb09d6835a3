"""The branches and loops around a command, and the conditions that decide if bash runs it."""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from lachesis.plugins.dialects.shell.expansion import Variables
from lachesis.plugins.dialects.shell.splitting import LOGIC, Word, unknown_in

_KEYWORDS = frozenset({"do", "{", "}", "(", ")", "time", "exec", "nohup", "sudo", "function"})
_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}


@dataclass(slots=True)
class Branch:
    """Open ``if``, ``case`` or loop.

    Attributes:
        taken: True if bash runs the commands here, False if not, None if only bash knows.
        earlier: the same of the branches before this one.
        conditions: the result so far of the commands between ``if`` and ``then``, more than one if only bash knows it;
            None outside.
        subject: the word of a ``case``.
        patterns: the ``case``'s patterns read so far; None among its commands.
    """

    taken: bool | None = None
    earlier: bool | None = False
    conditions: list[bool | None] | None = None
    subject: Word = ""
    patterns: list[str] | None = None


@dataclass(slots=True)
class Branches:
    """The open branches, the innermost last, with the variables that their conditions compare."""

    variables: Variables
    open: list[Branch] = field(default_factory=list["Branch"])

    def in_patterns(self) -> bool:
        return bool(self.open) and self.open[-1].patterns is not None

    def follow(self, rest: list[str]) -> list[str]:
        """Follow the keywords and patterns at the beginning of a command; return the words after them."""
        while rest:
            word, branch = rest[0], self.open[-1] if self.open else None
            if word in ("if", "while", "until"):
                self.open.append(Branch(conditions=None if word == "until" else []))
            elif word == "for" and len(rest) > 1:
                self.open.append(Branch())
                self.variables.conditional.add(rest[1])
                return []
            elif word == "case" and len(rest) > 2:
                self.open.append(Branch(subject=" ".join(self.variables.expand(rest[1], whole=True)), patterns=[]))
                rest = rest[2:]
            elif branch is None:
                if word not in _KEYWORDS:
                    return rest
            elif word in ("fi", "esac", "done"):
                self.open.pop()
            elif word in ("then", "do") and branch.conditions is not None:
                found, branch.conditions = branch.conditions, None
                condition = found[0] if len(found) == 1 else None
                # A loop that is entered may run more than once.
                self._enter(branch, condition if word == "then" or condition is False else None)
            elif word == "elif":
                branch.conditions = []
            elif word == "else":
                self._enter(branch, True)
            elif branch.patterns is not None:
                branch.patterns.append(word.lstrip("(").removesuffix(")"))
                if word.endswith(")"):
                    self._enter(branch, self._matches(branch.subject, branch.patterns))
                    branch.patterns = None
            elif word not in _KEYWORDS:
                return rest
            rest = rest[1:]
        return rest

    def _enter(self, branch: Branch, condition: bool | None) -> None:
        """Note whether the next commands run: the condition holds, and no earlier one did."""
        if branch.earlier is not False:
            branch.taken = False if branch.earlier or condition is False else None
        else:
            branch.taken = condition
        branch.earlier = True if branch.earlier or branch.taken else None if branch.taken is None else branch.earlier

    def _matches(self, subject: Word, patterns: Sequence[str]) -> bool | None:
        expanded = ("".join(self.variables.expand(pattern, whole=True)) for pattern in patterns)
        return None if unknown_in(subject) else any(fnmatch.fnmatchcase(subject, pattern) for pattern in expanded)

    def running(self, chained: bool | None) -> bool | None:
        states = [*(branch.taken for branch in self.open), chained]
        return False if False in states else None if None in states else True

    def decide(self, raw: Sequence[str]) -> bool | None:
        """Return the result of ``[ ... ]``; None for other commands, or if only bash knows."""
        negated, words = raw[0] == "!", [word for word in raw if word != "!"]
        if words[:1] == ["getopts"] and not self.variables.arguments:
            return False
        if words in (["true"], [":"], ["false"]):
            return (words != ["false"]) != negated
        if not words or words[0] not in ("[", "[[", "test") or LOGIC.intersection(words):
            return None
        # It is known here if a variable is set, but variables of a launcher, such as RANK, have no value to compare.
        asks_if_set = words[1:2] in (["-z"], ["-n"])
        expand = self.variables.lenient if asks_if_set else partial(self.variables.expand, whole=True)
        found = ["".join(expand(word)[:1]) for word in words[1:] if word not in ("]", "]]")]
        if any(map(unknown_in, found)):
            return None
        match found:
            case ["-z", text]:
                result = not text
            case ["-n", text] | [text]:
                result = bool(text)
            case [left, "=" | "==" | "!=" as sign, right]:
                result = fnmatch.fnmatchcase(left, right) == (sign != "!=")
            case [left, "=~", right] if re.fullmatch(r"[\w./^$-]*", right):
                result = re.search(right, left) is not None
            case [left, sign, right] if sign in _COMPARISONS and left.isdecimal() and right.isdecimal():
                result = _COMPARISONS[sign](int(left), int(right))
            case _:
                return None
        return result != (negated or raw[1:2] == ["!"])
