"""The command ``lachesis scripts``: the scripts of other trainers' documents, under their names, as they work here."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from lachesis.cli.base import app, console, shown
from lachesis.config.init import write_new
from lachesis.plugins.dialects.commands.foreign_commands import PROGRAMS

_COMMAND = """\
#!/bin/bash
exec python -c 'from lachesis.plugins.dialects.commands.foreign_commands import main; main()' {program} "$@"
"""

_MODULE = '''\
"""``{program}``, as Lachesis does it."""

import sys

from lachesis.plugins.dialects.commands.foreign_commands import main

if __name__ == "__main__":
    sys.argv[1:1] = ["{program}"]
    main()
'''

_TRANSFORMS = '''\
"""What the transforms of grpo_code make of rows: simple_test_transforms.py [FILE.jsonl]"""

import json
import sys
from pathlib import Path

from lachesis.rollouts.rewards import grpo_code

FILE = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("finetuning_dataset.jsonl")
rows = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines() if line.strip()]
for transform in (grpo_code.instruction_response_transform, grpo_code.instruction_response_with_tests_transform):
    function, _ = transform(None)
    fitting = [row for row in rows if "with_tests" not in transform.__name__ or row.get("test_cases")]
    made = [function(row) for row in fitting]
    assert all(row["instruction"] and row["response"] for row in made), f"{transform.__name__}: an empty field"
    print(f"{transform.__name__}: {len(made)} of {len(rows)} rows")
    if made:
        print("  " + json.dumps(made[0], ensure_ascii=False))
'''


# Of a file that `pip install -r` is given before all else.
_REQUIREMENTS = "# Nothing: what replaces example_trainer is installed with Lachesis.\n"


@app.command("scripts")
def scripts_command(
    directory: Annotated[Path, typer.Argument(help="Where to; made if it is not there.")],
) -> None:
    """Write the scripts and commands of other trainers' documents, which run Lachesis."""
    written = write_new(documented_files(directory))
    for path in written:
        if path.suffix == ".sh" or path.parent.name == "bin":
            path.chmod(0o755)
    console.print(f"wrote {', '.join(shown(path) for path in written)}")
    console.print(f'axolotl, trl and accelerate are commands with: export PATH="{directory.resolve()}/bin:$PATH"')


def documented_files(directory: Path) -> dict[Path, str]:
    """Return the files to write, by path."""
    shipped = sorted(files("lachesis.plugins.dialects").joinpath("documented").iterdir(), key=lambda file: file.name)
    found = {directory / file.name: file.read_text(encoding="utf-8") for file in shipped}
    found[directory / "simple_test_transforms.py"] = _TRANSFORMS
    found[directory / "example_trainer" / "requirements.txt"] = _REQUIREMENTS
    for program in PROGRAMS:
        if "." not in program:
            found[directory / "bin" / program] = _COMMAND.format(program=program)
        elif program.endswith(".py"):
            found[directory / program] = _MODULE.format(program=program)
        else:
            found[directory / f"{program.replace('.', '/')}.py"] = _MODULE.format(program=program)
    return found
