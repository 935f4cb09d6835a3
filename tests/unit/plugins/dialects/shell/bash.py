"""Scripts as bash runs them, beside the words that the reader finds."""

from __future__ import annotations

import subprocess

from lachesis.plugins.dialects.shell.interpreter import commands
from lachesis.plugins.dialects.shell.splitting import readable, unknown_in

HOME = {"HOME": "/home/me", "SET": "from outside"}


def words_of_bash(script: str) -> list[str]:
    """Return the words that bash gives to each command ``run`` of a script."""
    prints = 'run() { printf "%s\\0" "$@" >&3; }\nexec 3>&1\n'
    said = subprocess.run(["bash", "-c", prints + script], env=HOME, capture_output=True, check=True, timeout=20)
    return said.stdout.decode().split("\0")[:-1]


def words_read(script: str) -> list[str]:
    """Return the words that the reader finds for each command ``run`` of a script."""
    return [word for words in commands(script, environment=HOME) if words[0] == "run" for word in words[1:]]


def assert_only_bash_knows(script: str, name: str) -> None:
    """Assert that the last word of a script's first command ``run`` stays as the script writes it."""
    word = next(words for words in commands(script, environment={}) if "run" in words)[-1]
    assert unknown_in(word) == name and name in readable(word)
