"""The simple commands of a shell script, with its own variables, arrays and defaults expanded as bash does.

Nothing is run. Assignments count in the order of the script. What bash would only know while it runs (the output of a
command, an assignment inside ``if`` or ``case``, a variable that is not set) stays in a word as ``$NAME``, and
:func:`unknown_in` finds it there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lachesis.common.errors import ConfigError

Word = str
Command = list[Word]

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
# NAME, NAME[...], and an operator with what follows it: ${X:-default}, ${X-default}, ${X:=default}, ${X%suffix}.
_BRACED = re.compile(r"([A-Za-z_]\w*|[0-9@*#]+)(\[[@*]\])?(:?[-=+?]|[%#/:^,].*)?(.*)", re.DOTALL)
_UNKNOWN = re.compile(r"\x00([^\x00]*)\x00")
_OPERATORS = ("&&", "||", ";;", ">>", "2>", "&>", "|&", "|", ";", "&", ">", "<")
_DECLARATIONS = frozenset({"export", "local", "declare", "readonly", "typeset"})
_OPENS, _CLOSES = frozenset({"if", "case", "for", "while", "until"}), frozenset({"fi", "esac", "done"})
_KEYWORDS = frozenset({"then", "else", "elif", "do", "{", "}", "time", "!", "exec", "nohup", "sudo", "function"})
_ARGUMENTS = frozenset({"@", "*"})


def unknown_in(word: Word) -> str | None:
    """Return the name of what could not be expanded in a word, as the script writes it, or None."""
    match = _UNKNOWN.search(word)
    return match[1] if match else None


def readable(word: Word) -> str:
    """Return a word as the script writes it, with what could not be expanded as ``$NAME``."""
    return _UNKNOWN.sub(lambda match: match[1], word)


def commands(text: str, *, environment: Mapping[str, str]) -> list[Command]:
    """Return the simple commands of a script, each as its words, redirections left out.

    Args:
        text: of the script.
        environment: variables that are set when the script starts.

    Raises:
        ConfigError: a quotation is not closed.
    """
    shell = _Shell(variables=dict(environment))
    return [words for line in _simple_commands(text) if (words := shell.execute(line))]


@dataclass(slots=True)
class _Shell:
    """Variables and arrays as they are after the commands so far."""

    variables: dict[str, str]
    arrays: dict[str, list[Word]] = field(default_factory=dict[str, list[Word]])
    conditional: set[str] = field(default_factory=set[str])
    depth: int = 0

    def execute(self, raw: Sequence[str]) -> Command:
        """Take the assignments at the beginning of a command; return its other words expanded."""
        rest = list(raw)
        while rest and (rest[0] in _KEYWORDS or rest[0] in _OPENS | _CLOSES):
            self.depth += (rest[0] in _OPENS) - (rest[0] in _CLOSES)
            if rest[0] in ("for", "case"):
                if rest[0] == "for" and len(rest) > 1:
                    self.conditional.add(rest[1])
                return []
            rest.pop(0)
        if rest and rest[0] in _DECLARATIONS:
            rest = [word for word in rest[1:] if not word.startswith("-")]
        while rest and (match := _ASSIGNMENT.fullmatch(rest[0])):
            self._assign(match[1], match[3], more=bool(match[2]))
            rest.pop(0)
        return [word for one in rest for word in self.expand(one)]

    def _assign(self, name: str, raw: str, *, more: bool) -> None:
        if self.depth > 0:
            # Which branch is taken shows at run time only.
            self.conditional.add(name)
        elif raw.startswith("("):
            items = [word for part in _split(raw[1:-1]) for one in part for word in self.expand(one)]
            self.arrays[name] = [*self.arrays.get(name, ()), *items] if more else items
        else:
            value = " ".join(self.expand(raw, whole=True))
            self.variables[name] = self.variables.get(name, "") + value if more else value
            self.conditional.discard(name)

    def expand(self, raw: str, *, whole: bool = False) -> list[Word]:
        """Return the words that a raw word becomes: none for an empty ``$@``, several for an array or an unquoted text.

        ``whole`` keeps it one word, as in an assignment.
        """
        words, current, quoted, index = [], "", False, 0
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
                current += raw[index] if index < len(raw) else ""
            elif letter in "$`":
                found, index = self._parameter(raw, index)
                if isinstance(found, list):
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
        if current or (quoted and not raw.strip("\"'").startswith(("$@", "$*", "${@", "${*"))):
            words.append(current)
        return words

    def _parameter(self, raw: str, index: int) -> tuple[str | list[Word], int]:
        """Expand what begins with a dollar sign or a backquote at ``index``; return it and the index behind it."""
        if raw[index] == "`":
            end = raw.find("`", index + 1)
            return _unknown(raw[index : end + 1]), end + 1 if end > 0 else len(raw)
        after = raw[index + 1 : index + 2]
        if after == "(":
            end = _closing(raw, index + 1, "(", ")")
            inner = raw[index : end + 1]
            if inner == "$(pwd)":
                return self._value("PWD", inner), end + 1
            return self._arithmetic(inner) if inner.startswith("$((") else _unknown(inner), end + 1
        if after == "{":
            end = _closing(raw, index + 1, "{", "}")
            return self._braced(raw[index + 2 : end], raw[index : end + 1]), end + 1
        match = _NAME.match(raw, index + 1)
        if match is None:
            return "$", index + 1
        return self._value(match[0], f"${match[0]}"), match.end()

    def _value(self, name: str, written: str) -> str | list[Word]:
        if name in _ARGUMENTS:
            return []  # a script is read as it is started without arguments
        if name in self.conditional or name not in self.variables:
            return _unknown(written)
        return self.variables[name]

    def _braced(self, inner: str, written: str) -> str | list[Word]:
        match = _BRACED.fullmatch(inner)
        if match is None:
            return _unknown(written)
        name, all_of, operator, rest = match[1], match[2], match[3] or "", match[4]
        if name in self.arrays and (all_of or not operator):
            return list(self.arrays[name]) if all_of else self.arrays[name][0]
        if name in _ARGUMENTS:
            return []
        known = name in self.variables and name not in self.conditional
        if operator.lstrip(":") == "+" and name not in self.conditional:
            used = known and (self.variables[name] or ":" not in operator)
            return " ".join(self.expand(rest, whole=True)) if used else ""
        if operator.lstrip(":") in ("-", "="):
            missing = name not in self.conditional and not (known and (self.variables[name] or ":" not in operator))
            if not missing:
                return self._value(name, written)
            value = " ".join(self.expand(rest, whole=True))
            if operator.endswith("="):
                self.variables[name] = value
            return value
        return self._value(name, written) if not operator or operator.endswith("?") else _unknown(written)

    def _arithmetic(self, written: str) -> str:
        """Return the value of ``$((...))`` over whole numbers, with + - * / % and parentheses."""
        text = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda m: self.variables.get(m[1], m[0]), written[3:-2])
        if not re.fullmatch(r"[\d\s+\-*/%()]+", text) or "**" in text or len(text) > 200:
            return _unknown(written)
        try:
            return str(int(_Sum(text.replace(" ", "")).value()))
        except (ValueError, ZeroDivisionError, IndexError):
            return _unknown(written)


@dataclass(slots=True)
class _Sum:
    """A sum of whole numbers as bash computes it."""

    text: str
    index: int = 0

    def value(self) -> int:
        found = self._product()
        while self._at("+-"):
            found += self._product() if self._take() == "+" else -self._product()
        return found

    def _product(self) -> int:
        found = self._factor()
        while self._at("*/%"):
            sign, other = self._take(), self._factor()
            if sign == "*":
                found *= other
            else:
                quotient = int(found / other)  # towards zero, as in C
                found = quotient if sign == "/" else found - other * quotient
        return found

    def _factor(self) -> int:
        if self._at("("):
            self._take()
            found = self.value()
            self._take()
            return found
        if self._at("-"):
            self._take()
            return -self._factor()
        match = re.compile(r"\d+").match(self.text, self.index)
        if match is None:
            raise ValueError(self.text)
        self.index = match.end()
        return int(match[0])

    def _at(self, letters: str) -> bool:
        return self.text[self.index : self.index + 1] in tuple(letters)

    def _take(self) -> str:
        self.index += 1
        return self.text[self.index - 1]


def _unknown(written: str) -> str:
    return f"\x00{written}\x00"


def _closing(raw: str, index: int, opening: str, closing: str) -> int:
    """Return the index of the bracket that closes the one at ``index``; the last letter where none does."""
    depth = 0
    for place in range(index, len(raw)):
        depth += (raw[place] == opening) - (raw[place] == closing)
        if depth == 0:
            return place
    return len(raw) - 1


def _simple_commands(text: str) -> Iterator[list[str]]:
    """Yield the raw words of each simple command, quotes and dollar signs still in them."""
    for words in _split(text.replace("\\\n", " ")):
        command: list[str] = []
        skip = False
        for word in words:
            if skip:
                skip = False
            elif word in (">", ">>", "<", "2>", "&>"):
                skip = True
            else:
                command.append(word)
        if command:
            yield command


def _split(text: str) -> Iterator[list[str]]:
    """Yield the raw words between the separators of commands.

    Raises:
        ConfigError: a quotation is not closed.
    """
    words: list[str] = []
    current, index, quote = "", 0, ""
    here_document: str | None = None

    def end_word() -> None:
        nonlocal current
        if current:
            words.append(current)
        current = ""

    while index < len(text):
        letter = text[index]
        if quote:
            current += letter
            if letter == "\\" and quote == '"':
                index += 1
                current += text[index : index + 1]
            elif letter == quote:
                quote = ""
        elif letter in "'\"":
            quote, current = letter, current + letter
        elif letter == "\\":
            current += text[index : index + 2]
            index += 1
        elif letter == "#" and not current:
            index = _line_end(text, index) - 1
        elif text.startswith("<<", index) and not text.startswith("<<<", index):
            match = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?").match(text, index)
            if match is not None:
                here_document, index = match[1], match.end() - 1
        elif letter == "$" and text[index + 1 : index + 2] in ("(", "{"):
            opening = text[index + 1]
            end = _closing(text, index + 1, opening, ")" if opening == "(" else "}")
            current += text[index : end + 1]
            index = end
        elif letter == "(" and current.endswith("="):
            end = _closing(text, index, "(", ")")
            current += re.sub(r"(?m)(^|\s)#.*$", " ", text[index : end + 1]).replace("\n", " ")
            index = end
        elif (
            letter == "\n"
            or text.startswith((";", "&&", "||"), index)
            or (letter in "|&" and not current.endswith((">", "<")))
        ):
            end_word()
            yield words
            words = []
            index += 1 if text.startswith((";;", "&&", "||", "|&"), index) else 0
            if letter == "\n" and here_document is not None:
                end = re.compile(rf"^\s*{here_document}\s*$", re.MULTILINE).search(text, index)
                index, here_document = (end.end() if end else len(text)), None
        elif letter in "<>" and not current.isdigit():
            end_word()
            operator = ">>" if text.startswith(">>", index) else letter
            words.append(operator)
            index += len(operator) - 1 + text.startswith("&", index + len(operator))
        elif letter == ">":
            current = ""
            words.append(">")
            index += text.startswith("&", index + 1)
        elif letter.isspace():
            end_word()
        else:
            current += letter
        index += 1
    if quote:
        raise ConfigError(f"a quotation with {quote} is not closed", remedy="close it, as bash needs it")
    end_word()
    yield words


def _line_end(text: str, index: int) -> int:
    end = text.find("\n", index)
    return len(text) if end < 0 else end
