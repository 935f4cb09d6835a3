"""What looking and asking imports: `--help`, `explain` and `status` answer at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lachesis.run.directory import RunDirectory
from tests.paths import SOURCE
from tests.waiting import LONG_S


def test_a_reader_that_has_gone_is_told_by_the_code_alone():
    arguments = [sys.executable, "-c", "from lachesis.cli import main; main()", "explain", "optimizer"]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(LONG_S) == 128 + signal.SIGPIPE


def test_importing_the_command_line_loads_no_torch():
    """`lachesis explain` and `--help` answer at once."""
    code = "import sys, lachesis.cli; sys.exit(bool({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=LONG_S).returncode == 0


def test_it_imports_no_command():
    """Its tenth of a second would be half of one."""
    code = (
        "import sys\nfrom lachesis.cli import main\nsys.argv[1:] = ['--help']\ntry:\n    main()\nfinally:\n"
        "    heavy = ('pydantic', 'torch', 'lachesis.config')\n"
        "    print(sorted(name for name in sys.modules if name.startswith(heavy)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG_S)
    assert done.stdout.rstrip().endswith("[]"), done.stdout


@pytest.mark.parametrize("command", ["grpo", "run", "train", "serve"])
def test_that_of_a_command_imports_no_torch(command: str):
    code = (
        f"import sys\nfrom lachesis.cli import main\nsys.argv[1:] = ['{command}', '-h']\ntry:\n    main()\n"
        "finally:\n    print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG_S)
    assert done.stdout.rstrip().endswith("False"), done.stdout


def test_libraries_say_nothing_where_a_part_is_asked_for_from_python():
    """Of kernels that are not there, and of deprecations between two of them."""
    done = subprocess.run(
        [sys.executable, "-c", "import lachesis; lachesis.Policy"], capture_output=True, text=True, timeout=2 * LONG_S
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_reading_a_configuration_is_quick_and_loads_no_framework():
    program = (
        "import sys, time\n"
        "import lachesis.config.load, lachesis.config.rules, lachesis.config.explain\n"
        "heavy = {'torch', 'transformers', 'vllm', 'peft', 'datasets', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'{heavy} {time.process_time()}' if heavy or time.process_time() > 1.0 else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LONG_S)
    assert done.returncode == 0, done.stderr


def test_the_package_is_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "lachesis", "version"],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=LONG_S,
    )
    assert done.returncode == 0 and done.stdout.strip()


HELP = {
    ("grpo", "--help"): "--weight-bridge-mode",
    ("run", "-h"): "lachesis run CONFIG",
    ("run",): "lachesis run CONFIG",
    ("env", "arithmetic", "serve", "--help"): "--env.group_size (8): ",
    ("env",): "--env.group_size (4): ",
}


@pytest.fixture(scope="module")
def helped() -> dict[tuple[str, ...], tuple[str, bool]]:
    """What each of the commands prints in a process of their own, and whether torch is there after it."""
    code = f"""if True:
        import contextlib, io, json, sys
        from lachesis.cli import app
        told = []
        for words in {list(map(list, HELP))}:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                app(words, standalone_mode=False)
            told.append((printed.getvalue(), "torch" in sys.modules))
        print(json.dumps(told))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return {words: (text, torch) for words, (text, torch) in zip(HELP, json.loads(done.stdout), strict=True)}


@pytest.mark.parametrize("words", HELP, ids=" ".join)
def test_help_needs_no_torch(words: tuple[str, ...], helped: dict[tuple[str, ...], tuple[str, bool]]):
    text, torch = helped[words]
    assert HELP[words] in text and not torch


def test_status_answers_without_torch(tmp_path: Path):
    run = RunDirectory(tmp_path / "run")
    run.begin(resume=False)
    code = "import sys, lachesis.run.status as s; s.read_status(s.Path(sys.argv[1])); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, str(run.path)], timeout=LONG_S).returncode == 0
