"""The command ``lachesis scripts``: the scripts of other trainers' documents, under their names, for Lachesis."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from lachesis.cli.base import app, console, shown
from lachesis.config.init import write_new
from lachesis.plugins.dialects.commands.foreign_commands import PROGRAMS

# Content of a file that documents pass to `pip install -r` first.
_REQUIREMENTS = "# Empty: the replacement of example_trainer is installed with Lachesis.\n"


@app.command("scripts")
def scripts_command(directory: Annotated[Path, typer.Argument(help="Where to; made if it is not there.")]) -> None:
    """Write the scripts and commands of other trainers' documents, which run Lachesis."""
    written = write_new(documented_files(directory))
    for path in written:
        if path.suffix == ".sh" or path.parent.name == "bin":
            path.chmod(0o755)
    console.print(f"wrote {', '.join(shown(path) for path in written)}")
    console.print(f'axolotl, trl and accelerate are commands with: export PATH="{directory.resolve()}/bin:$PATH"')


def documented_files(directory: Path) -> dict[Path, str]:
    """Return the files to write, by path."""
    command, module, transforms = map(_template, ("command.sh", "module.py", "simple_test_transforms.py"))
    shipped = sorted(files("lachesis.plugins.dialects").joinpath("documented").iterdir(), key=lambda file: file.name)
    found = {directory / file.name: file.read_text(encoding="utf-8") for file in shipped}
    found[directory / "simple_test_transforms.py"] = transforms
    found[directory / "example_trainer" / "requirements.txt"] = _REQUIREMENTS
    for program in PROGRAMS:
        if "." not in program:
            found[directory / "bin" / program] = command.format(program=program)
        elif program.endswith(".py"):
            found[directory / program] = module.format(program=program)
        else:
            found[directory / f"{program.replace('.', '/')}.py"] = module.format(program=program)
    return found


def _template(name: str) -> str:
    """Return the text of a file to write, which may contain the name of the program that it replaces."""
    return files("lachesis.plugins.dialects.commands").joinpath("templates", f"{name}.txt").read_text(encoding="utf-8")
