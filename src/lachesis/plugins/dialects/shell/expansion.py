"""The variables of a script, and what its words expand to with them."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from lachesis.plugins.dialects.shell.arithmetic import computed
from lachesis.plugins.dialects.shell.splitting import Word, closing, simple_commands, unknown, unknown_in

_T = TypeVar("_T")

_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
# ``[key]=value`` of an associative array, and ``NAME[key]`` of one element.
_ELEMENT = re.compile(r"\[([^\[\]=]+)\]=(.*)", re.DOTALL)
_AT = re.compile(r"([A-Za-z_]\w*)\[([^@*\]]+)\]")
# NAME, NAME[...], and an operator with what follows it: ${X:-default}, ${X-default}, ${X:=default}, ${X%suffix}.
_BRACED = re.compile(r"([A-Za-z_]\w*|[0-9@*#]+)(\[[@*]\])?(:?[-=+?]|[%#/:^,].*)?(.*)", re.DOTALL)
# Commands that write variables which their words name.
_WRITERS = frozenset({"unset", "read", "mapfile", "readarray", "getopts"})
# Variables that ``let N=2`` and ``((N++))`` write.
_WRITTEN = re.compile(r"([A-Za-z_]\w*)\s*(?:\+\+|--|[-+*/%&|^]*=(?!=))|(?:\+\+|--)([A-Za-z_]\w*)")
# Test for an NPU in scripts that run on both kinds of machine; Lachesis does not run on NPUs.
_PROBE = re.compile(r"\$\(.*(?:torch_npu|npu-smi).*\|\|\s*echo\s+(\w+)\s*\)", re.DOTALL)
# Sums that another program computes: ``expr 16 / $N`` and ``echo "$N * 2" | bc``.
_COMPUTED = re.compile(r"""\$\(\s*(?:expr\s+([^|&;]*)|echo\s+["']?([^"'|]*?)["']?\s*\|\s*bc)\s*\)""")
# Commands that print a path, with few others in them.
_PATH = re.compile(r"\$\(\s*((?:cd|pwd|echo|dirname|basename|realpath|readlink)\b.{0,300})\)", re.DOTALL)
_ARGUMENTS = frozenset({"@", "*"})
# An argument of a script; it is read as if started without arguments.
_NO_ARGUMENT = re.compile(r"\x00\$\d\x00")
# Variables, arrays, and names of those that only bash knows.
State = tuple[dict[str, str], dict[str, list[Word]], set[str]]


@dataclass(slots=True)
class Variables:
    """Variables, arrays and arguments after the commands so far.

    Attributes:
        conditional: names of variables that only bash knows.
        arguments: ``$1`` and those after it.
        missing: the last file read by ``source`` that is not here.
        unset_is_empty: True where a variable that is not set is an empty word.
    """

    values: dict[str, str]
    arrays: dict[str, list[Word]] = field(default_factory=dict[str, list[Word]])
    conditional: set[str] = field(default_factory=set[str])
    arguments: list[Word] = field(default_factory=list[Word])
    missing: str = ""
    unset_is_empty: bool = False

    def state(self) -> State:
        return dict(self.values), dict(self.arrays), set(self.conditional)

    def take(self, before: State, names: Collection[str] | None = None) -> None:
        """Go back to an earlier state, of all variables or of these."""
        if names is None:
            self.values, self.arrays, self.conditional = before
            return
        self.values = _kept(self.values, before[0], names)
        self.arrays = _kept(self.arrays, before[1], names)
        self.conditional = (self.conditional - set(names)) | (before[2] & set(names))

    def assign(self, name: str, raw: str, *, more: bool, known: bool) -> None:
        name, subscript, key = name.removesuffix("]").partition("[")
        if not known:
            # The branch is known only at run time.
            self.conditional.add(name)
        elif subscript:
            key, items = " ".join(self.expand(key, whole=True)), self.arrays.get(name, [])
            place = self.known(key) or key
            value = (self._element(name, key, "") if more else "") + " ".join(self.expand(raw, whole=True))
            if place.isdecimal() and int(place) <= len(items) and f"{name}[{key}]" not in self.values:
                self.arrays[name] = [*items[: int(place)], value, *items[int(place) + 1 :]]
            else:
                self.values[f"{name}[{key}]"] = value
        elif raw.startswith("("):
            items = [word for part, _ in simple_commands(raw[1:-1]) for one in part for word in self.expand(one)]
            pairs = [match for item in items if (match := _ELEMENT.fullmatch(item)) is not None]
            self.values |= {f"{name}[{match[1]}]": match[2] for match in pairs}
            items = [match[2] for match in pairs] if pairs else items
            self.arrays[name] = [*self.arrays.get(name, ()), *items] if more else items
        else:
            value = " ".join(self.expand(raw, whole=True))
            self.values[name] = self.values.get(name, "") + value if more else value
            self.conditional.discard(name)

    def take_arguments(self, raw: Sequence[str], *, known: bool) -> None:
        """Take the arguments that ``shift`` leaves, or that ``set --`` gives."""
        given = [word for one in raw[1:] for word in self.expand(one)]
        if not known or (raw[0] == "shift" and not "".join(given).isdecimal() and given):
            self.arguments = [unknown(f"${number}") for number, _ in enumerate(self.arguments, 1)]
        else:
            self.arguments = self.arguments[int("".join(given) or 1) :] if raw[0] == "shift" else given[1:]

    def note_written(self, words: Sequence[Word], raw: str, *, known: bool) -> None:
        """Note that bash alone knows variables that a command such as ``read N``, ``let N=2`` or ``((N++))`` writes."""
        if words[:1] == ["unset"] and known:
            self.take(({}, {}, set()), words[1:])
        elif raw.startswith(("((", "let")):
            self.conditional |= {name for pair in _WRITTEN.findall(raw) for name in pair if name}
        elif words[:1] and (words[0] in _WRITERS or words[:2] == ["printf", "-v"]):
            self.conditional |= set(filter(_NAME.fullmatch, words[1:]))

    def lenient(self, raw: str) -> list[Word]:
        """Expand a word in which a variable that is not set is empty."""
        self.unset_is_empty = True
        try:
            return self.expand(raw, whole=True) or [""]
        finally:
            self.unset_is_empty = False

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
                current += unknown(raw[index : end + 1]) if "\\" in text else text
                index = end
            elif letter in "$`":
                found, index = self._parameter(raw, index)
                if isinstance(found, list):
                    emptied = emptied or not found
                    if found:
                        words += [current + found[0], *found[1:-1]] if len(found) > 1 else []
                        current = found[-1] if len(found) > 1 else current + found[0]
                        quoted = True
                elif inside or whole or unknown_in(found) is not None:
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
            return unknown(raw[index : end + 1]) if unknown_in("".join(found)) else found, end + 1
        after = raw[index + 1 : index + 2]
        if after == "(":
            end = closing(raw, index + 1)
            inner = raw[index : end + 1]
            if inner.startswith("$(("):
                return self._arithmetic(inner), end + 1
            if (computed := _COMPUTED.fullmatch(inner)) is not None:
                return self._arithmetic(f"$(({computed[1] or computed[2]}))"), end + 1
            if (probe := _PROBE.fullmatch(inner)) is not None:
                return probe[1], end + 1
            printed = _PATH.fullmatch(inner)
            path = self._path(printed[1]) if printed is not None else None
            return (unknown(inner) if path is None else path), end + 1
        if after == "{":
            end = closing(raw, index + 1)
            return self._braced(raw[index + 2 : end], raw[index : end + 1]), end + 1
        match = _NAME.match(raw, index + 1)
        if match is None:
            return "$", index + 1
        return self._value(match[0], f"${match[0]}"), match.end()

    def _value(self, name: str, written: str) -> str | list[Word]:
        if name in _ARGUMENTS:
            return list(self.arguments)
        value = self.known(name)
        if value is None:
            asked = f"{written} (set in {self.missing}? That file is not here)" if self.missing else written
            return "" if self.unset_is_empty and name not in self.conditional else unknown(asked)
        return value

    def known(self, name: str) -> str | None:
        """Return the value of a variable or argument, None if it has none or only bash knows it."""
        if name == "#":
            return str(len(self.arguments))
        if name.isdigit() and name != "0":
            return "".join(self.arguments[int(name) - 1 : int(name)]) if 0 < int(name) <= len(self.arguments) else None
        first = "".join(self.arrays.get(name, ())[:1]) if name in self.arrays else None
        value = None if name in self.conditional else self.values.get(name, first)
        return None if value is None or _NO_ARGUMENT.fullmatch(value) else value

    def _braced(self, inner: str, written: str) -> str | list[Word]:
        match = _BRACED.fullmatch(inner)
        if (element := _AT.fullmatch(inner)) is not None:
            return self._element(element[1], " ".join(self.expand(element[2], whole=True)), written)
        if inner.startswith("#") and (counted := inner[1:].removesuffix("[@]").removesuffix("[*]")):
            whole = self.known(counted) if counted == inner[1:] else self.arrays.get(counted)
            return unknown(written) if whole is None or counted in self.conditional else str(len(whole))
        if inner.startswith("!") and (named := self.known(inner[1:])) is not None:
            return self._value(named, written)
        if match is None:
            return unknown(written)
        name, all_of, operator, rest = match[1], match[2], match[3] or "", match[4]
        if name in _ARGUMENTS or (all_of and name in self.arrays and name not in self.conditional):
            items = self.arguments if name in _ARGUMENTS else self.arrays[name]
            if (kind := operator.lstrip(":")) in ("+", "-"):
                return self.expand(rest) if bool(items) == (kind == "+") else list(items)
            return list(items) if not operator else self._sliced(items, operator, written, from_1=name in _ARGUMENTS)
        known = self.known(name)
        if operator.lstrip(":") == "+" and name not in self.conditional:
            used = known or (known is not None and ":" not in operator)
            return " ".join(self.expand(rest, whole=True)) if used else ""
        if operator.lstrip(":") in ("-", "="):
            missing = name not in self.conditional and not (known or (known is not None and ":" not in operator))
            if not missing:
                return self._value(name, written)
            value = " ".join(self.expand(rest, whole=True))
            if operator.endswith("="):
                self.values[name] = value
            return value
        if (not operator and not rest) or operator.startswith(("?", ":?")):
            return self._value(name, written)
        edited = None if known is None else self._edited(known, operator)
        return unknown(written) if edited is None else edited

    def _sliced(self, items: Sequence[Word], operator: str, written: str, *, from_1: bool) -> str | list[Word]:
        """Return an array after ``:FIRST`` or ``:FIRST:LENGTH``, or with an edit of each of its words."""
        numbers = [self._arithmetic(f"$(({one}))") for one in operator[1:].split(":")]
        if operator[:1] == ":" and 1 <= len(numbers) <= 2 and all(map(str.isdecimal, numbers)):
            first = max(int(numbers[0]) - from_1, 0)
            return list(items[first : first + int(numbers[1]) if numbers[1:] else None])
        edited = [self._edited(one, operator) for one in items if operator[0] in "%#/^," and not unknown_in(one)]
        found = [one for one in edited if one is not None]
        return found if len(found) == len(items) else unknown(written)

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
        place, output = self.known("PWD") or "", None
        for line, _ in simple_commands(text):
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
        items, value = self.arrays.get(name, []), self.values.get(f"{name}[{key}]")
        place = key if re.fullmatch(r"-?\d+", key) else self.known(key) or ""
        if value is None and re.fullmatch(r"-?\d+", place) and -len(items) <= int(place) < len(items):
            value = items[int(place)]
        return unknown(written) if value is None or name in self.conditional else value

    def _arithmetic(self, written: str) -> str:
        """Return the value of ``$((...))`` over whole numbers, with + - * / % and parentheses."""
        expanded = "".join(self.expand(written[3:-2], whole=True))
        text = re.sub(r"[A-Za-z_]\w*", lambda name: self.known(name[0]) or name[0], expanded)
        value = computed(text)
        return unknown(written) if value is None else str(value)


def _kept(now: Mapping[str, _T], before: Mapping[str, _T], names: Collection[str]) -> dict[str, _T]:
    """Return ``now``, but with the values before of these names."""
    others = {name: value for name, value in now.items() if name not in names}
    return others | {name: before[name] for name in names if name in before}
