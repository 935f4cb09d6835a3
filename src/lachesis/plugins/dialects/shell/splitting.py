"""The raw words of a script's simple commands: quotations, brackets, here-documents and redirections.

A part of a word that only bash can expand is kept as ``$NAME``, between marks that :func:`unknown_in` looks for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from lachesis.common.errors import ConfigError

Word = str
Command = list[Word]
# The raw words of a command, and the separator after it.
Line = tuple[list[str], str]

LOGIC = frozenset({"&&", "||"})
_UNKNOWN = re.compile(r"\x00([^\x00]*)\x00")
_CLOSING = {"(": ")", "{": "}"}
_ANY = re.compile(r"[(){}]")
_QUOTED = re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*"|(?<=[\s(])\#[^\n]*|[(){}]""", re.DOTALL)
_QUOTATION = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|`[^`]*`""", re.DOTALL)
_HERE = re.compile(r"<<(?!<)-?\s*['\"]?(\w+)['\"]?")
_SEPARATOR = re.compile(r";;|&&|\|\||\|&|[\n;|&]")
_REDIRECTION = re.compile(r"(?:>>|<<<?|[<>])&?")


def unknown(written: str) -> Word:
    """Return a part of a word that only bash can expand, as the script writes it, between marks."""
    return f"\x00{written}\x00"


def unknown_in(word: Word) -> str | None:
    """Return the name of the part of a word that could not be expanded, as the script writes it, or None."""
    match = _UNKNOWN.search(word)
    return match[1] if match else None


def readable(word: Word) -> str:
    """Return a word as the script writes it, with parts that could not be expanded as ``$NAME``."""
    return _UNKNOWN.sub(lambda match: match[1], word)


def closing(raw: str, index: int) -> int:
    """Return the index of the bracket that closes the one at ``index``; the last character if none does.

    Brackets in quotes and comments of ``(...)`` do not count, unless a quote in it never ends.
    """
    depth, opening = 0, raw[index]
    for match in (_QUOTED if opening == "(" else _ANY).finditer(raw, index):
        depth += (match[0] == opening) - (match[0] == _CLOSING[opening])
        if depth == 0:
            return match.start()
    return len(raw) - 1


def simple_commands(text: str) -> Iterator[Line]:
    """Yield the raw words of each simple command, with quotes and dollar signs, and the separator after it.

    Raises:
        ConfigError: a quotation is not closed.
    """
    return _Splitter(text.replace("\r\n", "\n")).commands()


@dataclass(slots=True)
class _Splitter:
    """State of splitting a text: the words of the current command, and the characters of a word."""

    text: str
    index: int = 0
    words: list[str] = field(default_factory=list[str])
    current: str = ""
    redirected: bool = False
    """True after ``>`` or ``<``: the next word is a file or stream."""
    here: str | None = None
    """Word that ends a redirection's here-document, which begins on the next line."""
    reads: str | None = None
    """Variable that receives this document: ``read -r -d '' NAME <<EOF``."""

    def commands(self) -> Iterator[Line]:
        """Yield the raw words between the separators of commands, and the separator after them."""
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
                self.index = self._line_end()
            elif (here := _HERE.match(self.text, self.index)) is not None:
                self.here, self.index = here[1], here.end()
                self.reads = self.words[-1] if self.words[:1] == ["read"] else None
            elif (opening := self._opening(letter)) is not None:
                self._take(closing(self.text, opening) + 1)
            elif self.words.count("[[") > self.words.count("]]") and self.text[self.index : self.index + 2] in LOGIC:
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

    def _line_end(self) -> int:
        end = self.text.find("\n", self.index)
        return len(self.text) if end < 0 else end

    def _end_word(self) -> None:
        if self.current:
            self.words += [] if self.redirected else [self.current]
            self.current, self.redirected = "", False

    def _redirect(self, operator: re.Match[str]) -> None:
        """Leave out a redirection: the number before the operator, and the word after it."""
        if self.current.isdigit():
            self.current = ""
        self._end_word()
        self.redirected, self.index = True, operator.end()

    def _end_command(self, separator: re.Match[str]) -> Iterator[Line]:
        """Yield the command, and an assignment if its here-document is read into a variable."""
        self._end_word()
        yield self.words, separator[0]
        self.words, self.index, self.redirected = [], separator.end(), False
        if separator[0] != "\n" or self.here is None:
            return
        end = re.compile(rf"^\s*{self.here}\s*$", re.MULTILINE).search(self.text, separator.start())
        if self.reads is not None:
            yield [f'{self.reads}="{self.text[self.index : end.start() if end else len(self.text)]}"'], "\n"
        self.index, self.here, self.reads = (end.end() + 1 if end else len(self.text)), None, None
