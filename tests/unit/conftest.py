"""Settings of the units."""

from __future__ import annotations

from functools import cache

import typer.main

from lachesis import cli

# Typer makes the commands anew for each line of words, and half of a hundred lines are typed here.
cli.load()
typer.main.get_command = cache(typer.main.get_command)
