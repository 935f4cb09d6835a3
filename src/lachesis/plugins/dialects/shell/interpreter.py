"""The simple commands of a shell script, with its own variables, arrays and defaults expanded as bash does.

Nothing is run. Assignments count in the order of the script, and branches of ``if``, ``case``, ``&&`` and ``||`` are
taken if a comparison decides. Values known only at run time (the output of a command, an assignment in a branch that
depends on one, a variable that is not set) stay in a word as ``$NAME``; :func:`unknown_in` finds them there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from lachesis.plugins.dialects.shell.branches import Branches
from lachesis.plugins.dialects.shell.expansion import State, Variables
from lachesis.plugins.dialects.shell.splitting import LOGIC, Command, Line, Word, readable, simple_commands, unknown_in

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*(?:\[[^\]=]+\])?)(\+?)=(.*)", re.DOTALL)
_DECLARATIONS = frozenset({"export", "local", "declare", "readonly", "typeset"})
_SHELLS = frozenset({"bash", "sh"})
_FUNCTION = re.compile(r"(?:function\s+)?([\w:.-]+)\s*\(\s*\)(?=\s|\{|$)|function\s+([\w:.-]+)")


def commands(text: str, *, environment: Mapping[str, str], script: Path | None = None) -> list[Command]:
    """Return the simple commands of a script, each as its words, redirections left out.

    Args:
        text: of the script.
        environment: variables that are set when the script starts.
        script: its file, which ``$0`` and ``${BASH_SOURCE[0]}`` are.

    Raises:
        ConfigError: a quotation is not closed.
    """
    variables = Variables(dict(environment))
    if script is not None:
        variables.values["0"], variables.arrays["BASH_SOURCE"] = str(script), [str(script)]
    return list(_executed(_Shell(variables, Branches(variables)), simple_commands(text)))


def _executed(shell: _Shell, lines: Iterator[Line]) -> Iterator[Command]:
    """Yield the commands of a text, with those of ``bash -c TEXT``, ``eval TEXT`` and functions in their place."""
    for line, separator in lines:
        if (function := _FUNCTION.match(" ".join(line))) is not None:
            shell.functions[function[1] or function[2]] = _body(line, lines)
            continue
        words = shell.execute(line, separator)
        if shell.ended:
            return
        inner = next((place for place, word in enumerate(words[:-1]) if re.fullmatch(r"-\w*c", word)), None)
        if words[:1] == ["eval"]:
            yield from _executed(shell, simple_commands(" ".join(words[1:])))
        elif inner and Path(words[inner - 1]).name in _SHELLS and unknown_in(words[inner + 1]) is None:
            yield from _executed(shell, simple_commands(words[inner + 1]))
            shell.ended = False
        elif words and words[0] in shell.functions:
            yield from _called(shell, words)
        elif words[:1] in (["source"], ["."]) and len(words) > 1:
            yield from _sourced(shell, words[1])
        elif words:
            yield words


def _sourced(shell: _Shell, name: Word) -> Iterator[Command]:
    """Yield the commands of a file that the script reads by ``source``, from here or next to the script, if it exists.

    A file that reads itself is read once.
    """
    folders = () if unknown_in(name) else (Path(), Path(shell.variables.values.get("0", "")).parent)
    found = next((folder / name for folder in folders if (folder / name).is_file()), None)
    sources = shell.variables.arrays.setdefault("BASH_SOURCE", [])
    if found is None:
        shell.variables.missing = readable(name)
    elif str(found) not in sources:
        sources.insert(0, str(found))
        yield from _executed(shell, simple_commands(found.read_text(encoding="utf-8", errors="replace")))
        shell.ended = False
        sources.remove(str(found))


def _body(line: Sequence[str], lines: Iterator[Line]) -> list[Line]:
    """Take the commands between the braces of a function, whose first line is given, from the following ones."""
    first = line[line.index("{") + 1 :] if "{" in line else []
    body: list[Line] = [(list(first), "\n")] if first else []
    depth = int("{" in line)
    for words, separator in lines:
        opening = words[:1] == ["{"]
        depth += opening - (words[:1] == ["}"])
        if depth == 0 and words:
            break
        body.append((words[opening:], separator))
    return body


def _called(shell: _Shell, words: Command) -> Iterator[Command]:
    """Yield the commands of a function, which is not called again while it runs."""
    variables, body = shell.variables, shell.functions.pop(words[0])
    outside, local, before = variables.arguments, shell.local, variables.state()
    variables.arguments, shell.local = words[1:], set()
    yield from _executed(shell, iter(body))
    variables.take(before, shell.local)
    variables.arguments, shell.local, shell.ended = outside, local, False
    shell.functions.setdefault(words[0], body)


@dataclass(slots=True)
class _Shell:
    """State after the commands so far.

    Attributes:
        functions: their commands, by name.
        local: names of the local variables of the function that runs.
        outside: the variables before each ``(`` that is open.
        ended: True after ``exit`` or ``return`` outside branches.
        result: of the last command, None if only bash knows it.
        separator: between the last command and the next.
    """

    variables: Variables
    branches: Branches
    functions: dict[str, list[Line]] = field(default_factory=dict[str, list[Line]])
    local: set[str] = field(default_factory=set[str])
    outside: list[State] = field(default_factory=list[State])
    ended: bool = False
    result: bool | None = None
    separator: str = ""

    def execute(self, raw: Sequence[str], separator: str) -> Command:
        """Take the assignments at the beginning of a command; return its other words expanded.

        There are no words if bash does not run the command, or if it only begins or ends a branch.
        """
        opens = bool(raw) and re.match(r"\((?!\()", raw[0]) and not self.branches.in_patterns()
        if opens:
            self.outside.append(self.variables.state())
        words = [word for word in (raw[0][1:], *raw[1:]) if word] if opens else list(raw)
        closes = bool(self.outside and words) and words[-1].count(")") > words[-1].count("(")
        if not closes or self.branches.in_patterns():
            return self._execute(words, separator)
        found = self._execute([word for word in (*words[:-1], words[-1].removesuffix(")")) if word], separator)
        self.variables.take(self.outside.pop())
        return found

    def _execute(self, raw: Sequence[str], separator: str) -> Command:
        negated = None if self.result is None else not self.result
        chained = {"&&": self.result, "||": negated}.get(self.separator, True)
        if self.separator == ";;" and self.branches.open:
            self.branches.open[-1].patterns = []
        before, self.separator, self.result = "" if self.branches.in_patterns() else self.separator, separator, None
        rest = self.branches.follow(list(raw))
        if not rest:
            return []
        branch = self.branches.open[-1] if self.branches.open else None
        if branch is not None and branch.conditions is not None:
            self.result = self.branches.decide(rest)
            earlier = branch.conditions[-1:] if before in LOGIC else []
            if "{" in raw and earlier == [False]:
                branch.conditions.append(None)  # commands in these braces do not run
            else:
                branch.conditions[-1:] = [_joined(before, [*earlier, self.result])]
            return []
        running = self.branches.running(chained)
        if running is False:
            self.result = chained if chained is False and self.separator == "&&" else None
            return []
        if rest[0] in ("[", "[[", "test"):
            self.result = self.branches.decide(rest)
            return []
        if rest[0] == "shift" or rest[:2] == ["set", "--"]:
            self.variables.take_arguments(rest, known=running is True)
            return []
        if rest[0] in ("exit", "return") and not (self.branches.open or self.outside or before in LOGIC):
            self.ended = True
            return []
        declared, sums = rest[0] in _DECLARATIONS, False
        if declared:
            local = rest[0] in ("local", "declare", "typeset")
            sums = any(word.startswith("-") and "i" in word for word in rest)  # ``declare -i``: not read
            rest = [word for word in rest[1:] if not word.startswith("-")]
            self.local |= {word.partition("=")[0].removesuffix("+") for word in rest if local}
        found = map(_ASSIGNMENT.fullmatch, rest)
        matches = list(filter(None, found) if declared else takewhile(bool, found))
        left = [] if declared else rest[len(matches) :]
        words = [word for one in left for word in self.variables.expand(one)]
        inherits = bool(words) and (words[0] in self.functions or _SHELLS & {os.path.basename(one) for one in words})
        if left and not inherits:
            self.variables.note_written(words, " ".join(left), known=running is True)
            return words  # what is assigned before a command is for that command alone
        if before not in ("|", "|&") and separator not in ("|", "|&", "&"):  # shells of their own run these
            for match in filter(None, matches):
                self.variables.assign(match[1], match[3], more=bool(match[2]), known=running is True and not sums)
                self.result = True
        return words


def _joined(separator: str, results: Sequence[bool | None]) -> bool | None:
    """Return the result of commands that ``&&`` or ``||`` joins, None if it depends on one that only bash knows."""
    decisive = separator == "||"
    if len(results) > 1 and decisive in results:
        return decisive
    return None if None in results else results[-1]
