from __future__ import annotations

import contextlib
import shutil

import pytest

from lachesis.common.errors import ConfigError
from lachesis.plugins.dialects.shell.interpreter import commands
from tests.unit.plugins.dialects.shell.bash import words_of_bash, words_read

SCRIPTS = {
    "quotes": """A='$B "x"'\nrun "$A" 'a b' "a \\"b\\"" a\\ b""",
    "continuation": "run a \\\n  b \\\n  c",
    "comments": "run a # b\n# run c",
    "redirections": "run a > /dev/null 2>&1 b",
    "an array with comments": 'A=(\n  a=1  # one\n  # nothing\n  b=2\n)\nrun "${A[@]}"',
    "a comment between continued lines": "run a \\\n  # run b \\\nrun c",
    "a comment between an array's continued lines": "A=(a \\\n  # b (and 'c \\\n  d)\nrun ${A[@]}",
    "an array with a sharp and a bracket in quotes": 'A=(\'a #b\' "c)" d)\nrun "${A[@]}"',
    "a heredoc in a variable": "A=1\nread -r -d '' B <<EOF\nx$A y\nz\nEOF\nrun $B",
    "a text as input, and streams by their numbers": "read A <<< 'x'\nrun a 2>> /dev/null 0< /dev/null b\nrun c",
    "a space behind a backslash": "run a \\ \nrun b",
    "a word over two lines": 'run a\\\nb "c\\\nd" \'e\\\nf\' "\\d\\$"',
    "quotes with a dollar sign": "run $'a b' 'c'$'d'",
    "a list in quotes": """A=/x\nB="['$A', '$A/y']"\nrun files="$B\"""",
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is what it is compared with")
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_words_are_those_of_bash(script: str):
    assert words_read(script) == words_of_bash(script)


def test_here_documents_and_pipes_end_a_command():
    script = "cat > f <<EOF\nrun 'open\nEOF\nrun a | tee log && run b &\nrun c; run d"
    assert [words for words in commands(script, environment={}) if words[0] == "run"] == [
        ["run", "a"], ["run", "b"], ["run", "c"], ["run", "d"],
    ]  # fmt: skip


def test_a_quotation_that_is_not_closed_is_an_error():
    with pytest.raises(ConfigError, match='a quotation with " is not closed'):
        commands('run "a', environment={})


@pytest.mark.parametrize(
    "text", ["$" * 20000, "${" * 5000, "(" * 20000, "a=(" * 3000, '"$(' * 3000 + '"', "\\" * 20001]
)
def test_any_text_is_read_in_time(text: str):
    with contextlib.suppress(ConfigError):
        commands(text, environment={})
