"""The simple commands of a shell script, with its own variables, arrays and defaults expanded as bash does.

Nothing is run. Assignments count in the order of the script, and branches of ``if``, ``case``, ``&&`` and ``||`` are
taken if a comparison decides. Values known only at run time (the output of a command, an assignment in a branch that
depends on one, a variable that is not set) stay in a word as ``$NAME``; :func:`unknown_in` finds them there.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import TypeVar

from lachesis.common.errors import ConfigError

Word = str
_T = TypeVar("_T")
Command = list[Word]
_Line = tuple[list[str], str]

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*(?:\[[^\]=]+\])?)(\+?)=(.*)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
# NAME, NAME[...], and an operator with what follows it: ${X:-default}, ${X-default}, ${X:=default}, ${X%suffix}.
# ``[key]=value`` of an associative array, and ``NAME[key]`` of one element.
_ELEMENT = re.compile(r"\[([^\[\]=]+)\]=(.*)", re.DOTALL)
_AT = re.compile(r"([A-Za-z_]\w*)\[([^@*\]]+)\]")
_BRACED = re.compile(r"([A-Za-z_]\w*|[0-9@*#]+)(\[[@*]\])?(:?[-=+?]|[%#/:^,].*)?(.*)", re.DOTALL)
_UNKNOWN = re.compile(r"\x00([^\x00]*)\x00")
_DECLARATIONS = frozenset({"export", "local", "declare", "readonly", "typeset"})
_KEYWORDS = frozenset({"do", "{", "}", "(", ")", "time", "exec", "nohup", "sudo", "function"})
_SHELLS = frozenset({"bash", "sh"})
# Commands that write variables which their words name.
_WRITERS = frozenset({"unset", "read", "mapfile", "readarray", "getopts"})
# Variables that ``let N=2`` and ``((N++))`` write.
_WRITTEN = re.compile(r"([A-Za-z_]\w*)\s*(?:\+\+|--|[-+*/%&|^]*=(?!=))|(?:\+\+|--)([A-Za-z_]\w*)")
_LOGIC = frozenset({"&&", "||"})
# Variables, arrays, and names of those that only bash knows.
_State = tuple[dict[str, str], dict[str, list[Word]], set[str]]
_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
# Test for an NPU in scripts that run on both kinds of machine; Lachesis does not run on NPUs.
_PROBE = re.compile(r"\$\(.*(?:torch_npu|npu-smi).*\|\|\s*echo\s+(\w+)\s*\)", re.DOTALL)
# Sums that another program computes: ``expr 16 / $N`` and ``echo "$N * 2" | bc``.
_COMPUTED = re.compile(r"""\$\(\s*(?:expr\s+([^|&;]*)|echo\s+["']?([^"'|]*?)["']?\s*\|\s*bc)\s*\)""")
# Commands that print a path, with few others in them.
_PATH = re.compile(r"\$\(\s*((?:cd|pwd|echo|dirname|basename|realpath|readlink)\b.{0,300})\)", re.DOTALL)
_ARGUMENTS = frozenset({"@", "*"})
_FUNCTION = re.compile(r"(?:function\s+)?([\w:.-]+)\s*\(\s*\)(?=\s|\{|$)|function\s+([\w:.-]+)")
_ANY = re.compile(r"[(){}]")
_QUOTED = re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*"|(?<=[\s(])\#[^\n]*|[(){}]""", re.DOTALL)
_QUOTATION = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|`[^`]*`""", re.DOTALL)
_HERE = re.compile(r"<<(?!<)-?\s*['\"]?(\w+)['\"]?")
_SEPARATOR = re.compile(r";;|&&|\|\||\|&|[\n;|&]")
_REDIRECTION = re.compile(r"(>>|<<<?|[<>])&?")
# An argument of a script; it is read as if started without arguments.
_NO_ARGUMENT = re.compile(r"\x00\$\d\x00")


def unknown_in(word: Word) -> str | None:
    """Return the name of the part of a word that could not be expanded, as the script writes it, or None."""
    match = _UNKNOWN.search(word)
    return match[1] if match else None


def readable(word: Word) -> str:
    """Return a word as the script writes it, with parts that could not be expanded as ``$NAME``."""
    return _UNKNOWN.sub(lambda match: match[1], word)


def commands(text: str, *, environment: Mapping[str, str], script: Path | None = None) -> list[Command]:
    """Return the simple commands of a script, each as its words, redirections left out.

    Args:
        text: of the script.
        environment: variables that are set when the script starts.
        script: its file, which ``$0`` and ``${BASH_SOURCE[0]}`` are.

    Raises:
        ConfigError: a quotation is not closed.
    """
    shell = _Shell(variables=dict(environment))
    if script is not None:
        shell.variables["0"], shell.arrays["BASH_SOURCE"] = str(script), [str(script)]
    return list(_executed(shell, _simple_commands(text)))


def _executed(shell: _Shell, lines: Iterator[_Line]) -> Iterator[Command]:
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
            yield from _executed(shell, _simple_commands(" ".join(words[1:])))
        elif inner and Path(words[inner - 1]).name in _SHELLS and unknown_in(words[inner + 1]) is None:
            yield from _executed(shell, _simple_commands(words[inner + 1]))
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
    folders = () if unknown_in(name) else (Path(), Path(shell.variables.get("0", "")).parent)
    found = next((folder / name for folder in folders if (folder / name).is_file()), None)
    if found is None:
        shell.missing = readable(name)
    elif str(found) not in shell.arrays.setdefault("BASH_SOURCE", []):
        shell.arrays["BASH_SOURCE"].insert(0, str(found))
        yield from _executed(shell, _simple_commands(found.read_text(encoding="utf-8", errors="replace")))
        shell.ended = False
        shell.arrays["BASH_SOURCE"].remove(str(found))


def _body(line: Sequence[str], lines: Iterator[_Line]) -> list[_Line]:
    """Take the commands between the braces of a function, whose first line is given, from the following ones."""
    first = line[line.index("{") + 1 :] if "{" in line else []
    body: list[_Line] = [(list(first), "\n")] if first else []
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
    body, outside, local, before = shell.functions.pop(words[0]), shell.arguments, shell.local, shell.state()
    shell.arguments, shell.local = words[1:], set()
    yield from _executed(shell, iter(body))
    shell.take(before, shell.local)
    shell.arguments, shell.local, shell.ended = outside, local, False
    shell.functions.setdefault(words[0], body)


@dataclass(slots=True)
class _Branch:
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
class _Shell:
    """State after the commands so far: variables, arrays, and the branches around the next command.

    Attributes:
        functions: their commands, by name.
        arguments: ``$1`` and those after it.
        missing: the last file read by ``source`` that is not here.
        local: names of the local variables of the function that runs.
        outside: the state before each ``(`` that is open.
        ended: True after ``exit`` or ``return`` outside branches.
    """

    variables: dict[str, str]
    arrays: dict[str, list[Word]] = field(default_factory=dict[str, list[Word]])
    conditional: set[str] = field(default_factory=set[str])
    branches: list[_Branch] = field(default_factory=list[_Branch])
    functions: dict[str, list[_Line]] = field(default_factory=dict[str, "list[_Line]"])
    arguments: list[Word] = field(default_factory=list[Word])
    missing: str = ""
    local: set[str] = field(default_factory=set[str])
    outside: list[_State] = field(default_factory=list[tuple[dict[str, str], dict[str, list[str]], set[str]]])
    ended: bool = False
    unset_is_empty: bool = False
    result: bool | None = None
    separator: str = ""

    def execute(self, raw: Sequence[str], separator: str) -> Command:
        """Take the assignments at the beginning of a command; return its other words expanded.

        There are no words if bash does not run the command, or if it only begins or ends a branch.
        """
        opens = bool(raw) and re.match(r"\((?!\()", raw[0]) and not self._in_patterns()
        if opens:
            self.outside.append(self.state())
        words = [word for word in (raw[0][1:], *raw[1:]) if word] if opens else list(raw)
        closes = bool(self.outside and words) and words[-1].count(")") > words[-1].count("(")
        if not closes or self._in_patterns():
            return self._execute(words, separator)
        found = self._execute([word for word in (*words[:-1], words[-1].removesuffix(")")) if word], separator)
        self.take(self.outside.pop())
        return found

    def state(self) -> _State:
        return dict(self.variables), dict(self.arrays), set(self.conditional)

    def take(self, before: _State, names: Collection[str] | None = None) -> None:
        """Go back to an earlier state, of all variables or of these."""
        if names is None:
            self.variables, self.arrays, self.conditional = before
            return
        self.variables = _kept(self.variables, before[0], names)
        self.arrays = _kept(self.arrays, before[1], names)
        self.conditional = (self.conditional - set(names)) | (before[2] & set(names))

    def _in_patterns(self) -> bool:
        return bool(self.branches) and self.branches[-1].patterns is not None

    def _execute(self, raw: Sequence[str], separator: str) -> Command:
        negated = None if self.result is None else not self.result
        chained = {"&&": self.result, "||": negated}.get(self.separator, True)
        if self.separator == ";;" and self.branches:
            self.branches[-1].patterns = []
        before, self.separator, self.result = "" if self._in_patterns() else self.separator, separator, None
        rest = self._keywords(list(raw))
        if not rest:
            return []
        branch = self.branches[-1] if self.branches else None
        if branch is not None and branch.conditions is not None:
            self.result = self._decide(rest)
            earlier = branch.conditions[-1:] if before in ("&&", "||") else []
            if "{" in raw and earlier == [False]:
                branch.conditions.append(None)  # commands in these braces do not run
            else:
                branch.conditions[-1:] = [_joined(before, [*earlier, self.result])]
            return []
        running = self._running(chained)
        if running is False:
            self.result = chained if chained is False and self.separator == "&&" else None
            return []
        if rest[0] in ("[", "[[", "test"):
            self.result = self._decide(rest)
            return []
        if rest[0] == "shift" or rest[:2] == ["set", "--"]:
            given = [word for one in rest[1:] for word in self.expand(one)]
            if running is None or (rest[0] == "shift" and not "".join(given).isdecimal() and given):
                self.arguments = [_unknown(f"${number}") for number, _ in enumerate(self.arguments, 1)]
            else:
                self.arguments = self.arguments[int("".join(given) or 1) :] if rest[0] == "shift" else given[1:]
            return []
        if rest[0] in ("exit", "return") and not (self.branches or self.outside or before in ("&&", "||")):
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
        words = [word for one in left for word in self.expand(one)]
        inherits = bool(words) and (words[0] in self.functions or _SHELLS & {os.path.basename(one) for one in words})
        if left and not inherits:
            self._write(words, " ".join(left), known=running is True)
            return words  # what is assigned before a command is for that command alone
        if before not in ("|", "|&") and separator not in ("|", "|&", "&"):  # shells of their own run these
            for match in filter(None, matches):
                self._assign(match[1], match[3], more=bool(match[2]), known=running is True and not sums)
                self.result = True
        return words

    def _write(self, words: Sequence[Word], raw: str, *, known: bool) -> None:
        """Note that bash alone knows variables that a command such as ``read N``, ``let N=2`` or ``((N++))`` writes."""
        if words[:1] == ["unset"] and known:
            self.take(({}, {}, set()), words[1:])
        elif raw.startswith(("((", "let")):
            self.conditional |= {name for pair in _WRITTEN.findall(raw) for name in pair if name}
        elif words[:1] and (words[0] in _WRITERS or words[:2] == ["printf", "-v"]):
            self.conditional |= set(filter(_NAME.fullmatch, words[1:]))

    def _keywords(self, rest: list[str]) -> list[str]:
        """Follow the keywords and patterns at the beginning of a command; return the words after them."""
        while rest:
            word, branch = rest[0], self.branches[-1] if self.branches else None
            if word in ("if", "while", "until"):
                self.branches.append(_Branch(conditions=None if word == "until" else []))
            elif word == "for" and len(rest) > 1:
                self.branches.append(_Branch())
                self.conditional.add(rest[1])
                return []
            elif word == "case" and len(rest) > 2:
                self.branches.append(_Branch(subject=" ".join(self.expand(rest[1], whole=True)), patterns=[]))
                rest = rest[2:]
            elif branch is None:
                if word not in _KEYWORDS:
                    return rest
            elif word in ("fi", "esac", "done"):
                self.branches.pop()
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

    def _enter(self, branch: _Branch, condition: bool | None) -> None:
        """Note whether the next commands run: the condition holds, and no earlier one did."""
        if branch.earlier is not False:
            branch.taken = False if branch.earlier or condition is False else None
        else:
            branch.taken = condition
        branch.earlier = True if branch.earlier or branch.taken else None if branch.taken is None else branch.earlier

    def _matches(self, subject: Word, patterns: Sequence[str]) -> bool | None:
        expanded = ("".join(self.expand(pattern, whole=True)) for pattern in patterns)
        return None if unknown_in(subject) else any(fnmatch.fnmatchcase(subject, pattern) for pattern in expanded)

    def _running(self, chained: bool | None) -> bool | None:
        states = [*(branch.taken for branch in self.branches), chained]
        return False if False in states else None if None in states else True

    def _lenient(self, raw: str) -> list[Word]:
        """Expand a word in which a variable that is not set is empty."""
        self.unset_is_empty = True
        try:
            return self.expand(raw, whole=True) or [""]
        finally:
            self.unset_is_empty = False

    def _decide(self, raw: Sequence[str]) -> bool | None:
        """Return the result of ``[ ... ]``; None for other commands, or if only bash knows."""
        negated, words = raw[0] == "!", [word for word in raw if word != "!"]
        if words[:1] == ["getopts"] and not self.arguments:
            return False
        if words in (["true"], [":"], ["false"]):
            return (words != ["false"]) != negated
        if not words or words[0] not in ("[", "[[", "test") or _LOGIC.intersection(words):
            return None
        # It is known here if a variable is set, but variables of a launcher, such as RANK, have no value to compare.
        expand = self._lenient if words[1:2] in (["-z"], ["-n"]) else lambda word: self.expand(word, whole=True) or [""]
        found = [expand(word)[0] for word in words[1:] if word not in ("]", "]]")]
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

    def _assign(self, name: str, raw: str, *, more: bool, known: bool) -> None:
        name, subscript, key = name.removesuffix("]").partition("[")
        if not known:
            # The branch is known only at run time.
            self.conditional.add(name)
        elif subscript:
            key, items = " ".join(self.expand(key, whole=True)), self.arrays.get(name, [])
            place = self._known(key) or key
            value = (self._element(name, key, "") if more else "") + " ".join(self.expand(raw, whole=True))
            if place.isdecimal() and int(place) <= len(items) and f"{name}[{key}]" not in self.variables:
                self.arrays[name] = [*items[: int(place)], value, *items[int(place) + 1 :]]
            else:
                self.variables[f"{name}[{key}]"] = value
        elif raw.startswith("("):
            items = [word for part, _ in _Splitter(raw[1:-1]).commands() for one in part for word in self.expand(one)]
            pairs = [match for item in items if (match := _ELEMENT.fullmatch(item)) is not None]
            self.variables |= {f"{name}[{match[1]}]": match[2] for match in pairs}
            items = [match[2] for match in pairs] if pairs else items
            self.arrays[name] = [*self.arrays.get(name, ()), *items] if more else items
        else:
            value = " ".join(self.expand(raw, whole=True))
            self.variables[name] = self.variables.get(name, "") + value if more else value
            self.conditional.discard(name)

    def expand(self, raw: str, *, whole: bool = False) -> list[Word]:
        """Return the words that a raw word expands to: none for an empty ``$@``, several for an array or unquoted text.

        ``whole`` keeps it one word, as in an assignment.
        """
        words, current, quoted, emptied, index = [], "", False, False, 0
        raw = re.sub(r"^([A-Za-z_]\w*=)?~(?=/|$)", r"\1$HOME", raw)
        inside: str | None = None
        while index < len(raw):
            letter = raw[index]
            if inside == "'":
                inside, current = (None, current) if letter == "'" else (inside, current + letter)
            elif letter == "'" and inside is None:
                inside, quoted = "'", True
            elif letter == '"':
                inside, quoted = (None if inside else '"'), True
            elif letter == "\\":
                index += 1
                escaped = raw[index] if index < len(raw) else ""
                current += ("\\" if inside and escaped not in '$`"\\\n' else "") + escaped.strip("\n")
            elif letter == "$" and not inside and raw[index + 1 : index + 2] == "'":
                end = raw.find("'", index + 2) % len(raw)
                text, quoted = raw[index + 2 : end], True
                current += _unknown(raw[index : end + 1]) if "\\" in text else text
                index = end
            elif letter in "$`":
                found, index = self._parameter(raw, index)
                if isinstance(found, list):
                    emptied = emptied or not found
                    if found:
                        words += [current + found[0], *found[1:-1]] if len(found) > 1 else []
                        current = found[-1] if len(found) > 1 else current + found[0]
                        quoted = True
                elif inside or whole or _UNKNOWN.search(found):
                    current += found
                else:
                    first, *others = found.split() or [""]
                    current += first
                    for other in others:
                        words.append(current)
                        current = other
                continue
            else:
                current += letter
            index += 1
        if current or (quoted and not emptied):
            words.append(current)
        return words

    def _parameter(self, raw: str, index: int) -> tuple[str | list[Word], int]:
        """Expand the part that begins with a dollar sign or backquote at ``index``; return it and the next index."""
        if raw[index] == "`":
            end = raw.find("`", index + 1) % len(raw)
            found = self._parameter(f"$({raw[index + 1 : end]})", 0)[0]
            return _unknown(raw[index : end + 1]) if unknown_in("".join(found)) else found, end + 1
        after = raw[index + 1 : index + 2]
        if after == "(":
            end = _closing(raw, index + 1, "(", ")")
            inner = raw[index : end + 1]
            if inner.startswith("$(("):
                return self._arithmetic(inner), end + 1
            if (computed := _COMPUTED.fullmatch(inner)) is not None:
                return self._arithmetic(f"$(({computed[1] or computed[2]}))"), end + 1
            if (probe := _PROBE.fullmatch(inner)) is not None:
                return probe[1], end + 1
            printed = _PATH.fullmatch(inner)
            path = self._path(printed[1]) if printed is not None else None
            return (_unknown(inner) if path is None else path), end + 1
        if after == "{":
            end = _closing(raw, index + 1, "{", "}")
            return self._braced(raw[index + 2 : end], raw[index : end + 1]), end + 1
        match = _NAME.match(raw, index + 1)
        if match is None:
            return "$", index + 1
        return self._value(match[0], f"${match[0]}"), match.end()

    def _value(self, name: str, written: str) -> str | list[Word]:
        if name in _ARGUMENTS:
            return list(self.arguments)
        value = self._known(name)
        if value is None:
            asked = f"{written} (set in {self.missing}? That file is not here)" if self.missing else written
            return "" if self.unset_is_empty and name not in self.conditional else _unknown(asked)
        return value

    def _known(self, name: str) -> str | None:
        """Return the value of a variable or argument, None if it has none or only bash knows it."""
        if name == "#":
            return str(len(self.arguments))
        if name.isdigit() and name != "0":
            return "".join(self.arguments[int(name) - 1 : int(name)]) if 0 < int(name) <= len(self.arguments) else None
        first = "".join(self.arrays.get(name, ())[:1]) if name in self.arrays else None
        value = None if name in self.conditional else self.variables.get(name, first)
        return None if value is None or _NO_ARGUMENT.fullmatch(value) else value

    def _braced(self, inner: str, written: str) -> str | list[Word]:
        match = _BRACED.fullmatch(inner)
        if (element := _AT.fullmatch(inner)) is not None:
            return self._element(element[1], " ".join(self.expand(element[2], whole=True)), written)
        if inner.startswith("#") and (counted := inner[1:].removesuffix("[@]").removesuffix("[*]")):
            whole = self._known(counted) if counted == inner[1:] else self.arrays.get(counted)
            return _unknown(written) if whole is None or counted in self.conditional else str(len(whole))
        if inner.startswith("!") and (named := self._known(inner[1:])) is not None:
            return self._value(named, written)
        if match is None:
            return _unknown(written)
        name, all_of, operator, rest = match[1], match[2], match[3] or "", match[4]
        if name in _ARGUMENTS or (all_of and name in self.arrays and name not in self.conditional):
            items = self.arguments if name in _ARGUMENTS else self.arrays[name]
            if (kind := operator.lstrip(":")) in ("+", "-"):
                return self.expand(rest) if bool(items) == (kind == "+") else list(items)
            return list(items) if not operator else self._sliced(items, operator, written, from_1=name in _ARGUMENTS)
        known = self._known(name)
        if operator.lstrip(":") == "+" and name not in self.conditional:
            used = known or (known is not None and ":" not in operator)
            return " ".join(self.expand(rest, whole=True)) if used else ""
        if operator.lstrip(":") in ("-", "="):
            missing = name not in self.conditional and not (known or (known is not None and ":" not in operator))
            if not missing:
                return self._value(name, written)
            value = " ".join(self.expand(rest, whole=True))
            if operator.endswith("="):
                self.variables[name] = value
            return value
        if (not operator and not rest) or operator.startswith(("?", ":?")):
            return self._value(name, written)
        edited = None if known is None else self._edited(known, operator)
        return _unknown(written) if edited is None else edited

    def _sliced(self, items: Sequence[Word], operator: str, written: str, *, from_1: bool) -> str | list[Word]:
        """Return an array after ``:FIRST`` or ``:FIRST:LENGTH``, or with an edit of each of its words."""
        numbers = [self._arithmetic(f"$(({one}))") for one in operator[1:].split(":")]
        if operator[:1] == ":" and 1 <= len(numbers) <= 2 and all(map(str.isdecimal, numbers)):
            first = max(int(numbers[0]) - from_1, 0)
            return list(items[first : first + int(numbers[1]) if numbers[1:] else None])
        edited = [self._edited(one, operator) for one in items if operator[0] in "%#/^," and not unknown_in(one)]
        found = [one for one in edited if one is not None]
        return found if len(found) == len(items) else _unknown(written)

    def _edited(self, value: str, operation: str) -> str | None:
        """Return a value after ``%PATTERN``, ``#PATTERN``, ``/PATTERN/TEXT``, ``^^``, ``,,`` or ``:FIRST:LENGTH``."""
        match = re.fullmatch(r"(##?|%%?|//?|\^\^|,,|:)(.*)", operation, re.DOTALL)
        if match is None:
            return None
        sign, rest = match[1], " ".join(self.expand(match[2], whole=True))
        pattern, _, text = rest.partition("/" if sign[0] == "/" else ":")
        if sign in ("^^", ",,"):
            return value.upper() if sign == "^^" else value.lower()
        if sign == ":":
            known = pattern.isdecimal() and (not text or text.isdecimal())
            return value[int(pattern) :][: int(text) if text else None] if known else None
        if sign[0] == "/":
            glob = re.compile(fnmatch.translate(pattern).removesuffix(r"\Z"))
            return glob.sub(lambda _: text, value, count=0 if sign == "//" else 1)
        # One sign takes the shortest that matches, two the longest.
        ends = sorted(range(len(value) + 1), reverse=sign in ("##", "%"))
        cut = [(value[:end], value[end:]) if sign[0] == "#" else (value[end:], value[:end]) for end in ends]
        return next((kept for removed, kept in cut if fnmatch.fnmatchcase(removed, rest)), value)

    def _path(self, text: str) -> str | None:
        """Return what ``cd A && pwd``, ``dirname``, ``basename`` and ``realpath`` print; None for other commands."""
        place, output = self._known("PWD") or "", None
        for line, _ in _simple_commands(text):
            words = [word for raw in line for word in self.expand(raw) if word not in ("--", "-P", "-f", "-m")]
            if output is not None or any(map(unknown_in, words)):
                return None
            match words:
                case ["cd", folder]:
                    place = os.path.normpath(os.path.join(place, folder))
                case ["echo", *said] if not any(word.startswith("-") for word in said):
                    output = " ".join(said)
                case ["pwd"]:
                    output = place
                case ["dirname", path]:
                    output = os.path.dirname(path.rstrip("/")) or "."
                case ["basename", path, *suffix]:
                    output = os.path.basename(path.rstrip("/")).removesuffix("".join(suffix))
                case ["realpath" | "readlink", path]:
                    output = os.path.normpath(os.path.join(place, path))
                case _:
                    return None
        return output

    def _element(self, name: str, key: str, written: str) -> str:
        """Return the element of an array by its number, or of an associative one by its key."""
        items, value = self.arrays.get(name, []), self.variables.get(f"{name}[{key}]")
        place = key if re.fullmatch(r"-?\d+", key) else self._known(key) or ""
        if value is None and re.fullmatch(r"-?\d+", place) and -len(items) <= int(place) < len(items):
            value = items[int(place)]
        return _unknown(written) if value is None or name in self.conditional else value

    def _arithmetic(self, written: str) -> str:
        """Return the value of ``$((...))`` over whole numbers, with + - * / % and parentheses."""
        expanded = "".join(self.expand(written[3:-2], whole=True))
        text = re.sub(r"[A-Za-z_]\w*", lambda name: self._known(name[0]) or name[0], expanded)
        if not re.fullmatch(r"[\d\s+\-*/%()]+", text) or "**" in text or len(text) > 200:
            return _unknown(written)
        try:
            plain = re.sub(r"\b0(?=\d)", "0o", re.sub(r"\s", "", text))  # a leading zero means base 8
            return str(_computed(ast.parse(plain, mode="eval").body))
        except (ValueError, ZeroDivisionError, SyntaxError):
            return _unknown(written)


def _quotient(left: int, right: int) -> int:
    return int(left / right)  # towards zero, as in C


_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.Mod: lambda left, right: left - right * _quotient(left, right),
}


def _computed(sum_: ast.expr) -> int:
    """Return a sum of whole numbers as bash computes it. Raises ValueError for anything else."""
    match sum_:
        case ast.BinOp(left, sign, right) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_computed(left), _computed(right))
        case ast.UnaryOp(ast.USub(), operand):
            return -_computed(operand)
        case ast.Constant(int(number)):
            return number
        case _:
            raise ValueError(ast.unparse(sum_))


def _kept(now: Mapping[str, _T], before: Mapping[str, _T], names: Collection[str]) -> dict[str, _T]:
    """Return ``now``, but with the values before of these names."""
    others = {name: value for name, value in now.items() if name not in names}
    return others | {name: before[name] for name in names if name in before}


def _joined(separator: str, results: Sequence[bool | None]) -> bool | None:
    """Return the result of commands that ``&&`` or ``||`` joins, None if it depends on one that only bash knows."""
    decisive = separator == "||"
    if len(results) > 1 and decisive in results:
        return decisive
    return None if None in results else results[-1]


def _unknown(written: str) -> str:
    return f"\x00{written}\x00"


def _closing(raw: str, index: int, opening: str, closing: str) -> int:
    """Return the index of the bracket that closes the one at ``index``; the last character if none does.

    Brackets in quotes and comments of ``(...)`` do not count, unless a quote in it never ends.
    """
    depth = 0
    for match in (_QUOTED if opening == "(" else _ANY).finditer(raw, index):
        depth += (match[0] == opening) - (match[0] == closing)
        if depth == 0:
            return match.start()
    return len(raw) - 1


def _simple_commands(text: str) -> Iterator[tuple[list[str], str]]:
    """Yield the raw words of each simple command, with quotes and dollar signs, and the separator after it."""
    for words, separator in _Splitter(text.replace("\r\n", "\n")).commands():
        command: list[str] = []
        skip = False
        for word in words:
            if skip:
                skip = False
            elif word in (">", ">>", "<", "<<", "<<<"):
                skip = True
            else:
                command.append(word)
        yield command, separator


@dataclass(slots=True)
class _Splitter:
    """State of splitting a text: the words of the current command, and the characters of a word."""

    text: str
    index: int = 0
    words: list[str] = field(default_factory=list[str])
    current: str = ""
    here: str | None = None
    """Word that ends a redirection's here-document, which begins on the next line."""
    reads: str | None = None
    """Variable that receives this document: ``read -r -d '' NAME <<EOF``."""

    def commands(self) -> Iterator[_Line]:
        """Yield the raw words between the separators of commands, and the separator after them.

        Raises:
            ConfigError: a quotation is not closed.
        """
        while self.index < len(self.text):
            letter = self.text[self.index]
            if letter in "'\"`":
                self._take(self._quotation())
            elif letter == "\\":
                # The line continues, except after a comment, which ends with its line.
                escaped = self.text[self.index : self.index + 2]
                self.current += "" if escaped == "\\\n" else escaped
                self.index += 2
            elif letter == "#" and not self.current:
                self.index = _line_end(self.text, self.index)
            elif (here := _HERE.match(self.text, self.index)) is not None:
                self.here, self.index = here[1], here.end()
                self.reads = self.words[-1] if self.words[:1] == ["read"] else None
            elif (opening := self._opening(letter)) is not None:
                closing = ")" if self.text[opening] == "(" else "}"
                self._take(_closing(self.text, opening, self.text[opening], closing) + 1)
            elif self.words.count("[[") > self.words.count("]]") and self.text[self.index : self.index + 2] in _LOGIC:
                self._end_word()
                self.words.append(self.text[self.index : self.index + 2])
                self.index += 2
            elif (separator := _SEPARATOR.match(self.text, self.index)) is not None:
                yield from self._end_command(separator)
            elif (operator := _REDIRECTION.match(self.text, self.index)) is not None:
                self._redirect(operator)
            elif letter.isspace():
                self._end_word()
                self.index += 1
            else:
                self._take(self.index + 1)
        self._end_word()
        yield self.words, ""

    def _take(self, end: int) -> None:
        """Add the characters before ``end`` to the word."""
        self.current += self.text[self.index : end]
        self.index = end

    def _quotation(self) -> int:
        """Return the end of the quotation that begins here."""
        match = _QUOTATION.match(self.text, self.index)
        if match is None:
            quote = self.text[self.index]
            raise ConfigError(f"a quotation with {quote} is not closed", remedy="close it; bash needs that too")
        return match.end()

    def _opening(self, letter: str) -> int | None:
        """Return the place of the bracket of ``$(...)``, ``${...}`` and ``NAME=(...)``, if one begins here."""
        if letter == "$" and self.text[self.index + 1 : self.index + 2] in ("(", "{"):
            return self.index + 1
        return self.index if letter == "(" and self.current.endswith("=") else None

    def _end_word(self) -> None:
        if self.current:
            self.words.append(self.current)
        self.current = ""

    def _redirect(self, operator: re.Match[str]) -> None:
        """Add the operator of a redirection without the number before it; its file or stream is the next word."""
        if self.current.isdigit():
            self.current = ""
        self._end_word()
        self.words.append(operator[1])
        self.index = operator.end()

    def _end_command(self, separator: re.Match[str]) -> Iterator[_Line]:
        """Yield the command, and an assignment if its here-document is read into a variable."""
        self._end_word()
        yield self.words, separator[0]
        self.words, self.index = [], separator.end()
        if separator[0] != "\n" or self.here is None:
            return
        end = re.compile(rf"^\s*{self.here}\s*$", re.MULTILINE).search(self.text, separator.start())
        if self.reads is not None:
            yield [f'{self.reads}="{self.text[self.index : end.start() if end else len(self.text)]}"'], "\n"
        self.index, self.here, self.reads = (end.end() + 1 if end else len(self.text)), None, None


def _line_end(text: str, index: int) -> int:
    end = text.find("\n", index)
    return len(text) if end < 0 else end
