"""What looking and asking imports: `--help`, `explain` and `status` answer at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from lachesis.plugins.checks.doctor import write_proof
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


@pytest.mark.parametrize("made", [True, False], ids=["made by run.setup", "a directory"])
def test_a_plan_imports_nothing_to_ask_the_hub_of_a_local_model(tmp_path: Path, made: bool):
    """Torch takes seconds, and the hub's library with what it asks by a third of all that a plan takes."""
    config = write_proof(tmp_path)
    words = ["plan", str(config), "--device", "cpu"]
    if made:
        (tmp_path / "made.py").write_text("def make(path): ...\n")
        words += ["--set=model.path=made", f"--set=run.setup={tmp_path / 'made.py'}:make"]
    code = f"""if True:
        import sys
        from lachesis.cli import main
        sys.argv[1:] = {words}
        try:
            main()
        finally:
            heavy = {{"torch", "transformers", "numpy", "huggingface_hub", "httpx", "datasets", "peft"}}
            print("imported", sorted(heavy & set(sys.modules)))
    """
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=LONG_S)
    assert ("is made by run.setup" in done.stdout) == made, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("imported []"), done.stdout


@dataclass(frozen=True)
class Trained:
    """A step of a small run from Python, in a process of its own."""

    code: int
    said: str  # until it began
    imported: frozenset[str]
    frozen: list[int]  # how many objects the garbage collector did not see: during the step, and afterwards


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    directory = tmp_path_factory.mktemp("trained")
    config, found = write_proof(directory), directory / "found.json"
    code = f"""if True:
        import gc, json, os, sys
        import lachesis
        lachesis.Policy
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        frozen = []
        def reward(completions, **columns):
            frozen.append(gc.get_freeze_count())
            return [0.0] * len(completions)
        lachesis.train({str(config)!r}, rewards=[reward], run={{"steps": 1}}).wait()
        with open({str(found)!r}, "w") as file:
            json.dump([sorted(sys.modules), [frozen[0], gc.get_freeze_count()]], file)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=2 * LONG_S)
    modules, frozen = json.loads(found.read_text()) if found.exists() else ([], [])
    return Trained(done.returncode, done.stdout + done.stderr, frozenset(modules), frozen)


def test_libraries_say_nothing_where_a_part_is_asked_for_from_python(trained: Trained):
    """Of kernels that are not there, and of deprecations between two of them."""
    assert (trained.code, trained.said) == (0, "")


def test_a_plain_run_imports_nothing_that_is_heavy_and_of_no_use_to_it(trained: Trained):
    """Each of these takes up to a second: adapters, quantization, formats of data, servers, compilation."""
    heavy = {
        "peft", "bitsandbytes", "datasets", "pandas", "pyarrow", "scipy", "sklearn", "matplotlib", "fastapi", "vllm",
        "torchvision", "torch.utils.tensorboard", "torch._inductor.compile_fx", "openai", "anthropic", "verifiers",
    }  # fmt: skip
    assert "lachesis.run.train" in trained.imported
    assert not heavy & trained.imported


def test_a_run_freezes_what_stays_and_thaws_it_at_its_end(trained: Trained):
    during, after = trained.frozen
    assert during > 100_000 and after == 0


def test_the_engine_is_on_its_way_before_transformers_is_imported(tmp_path: Path):
    config = write_proof(tmp_path)
    code = f"""if True:
        import sys
        import lachesis.plugins.atropos.services
        from lachesis.cli import main
        from lachesis.process.managed import ManagedProcess
        def launch(process):
            print(process.command[3], "transformers" in sys.modules)
            raise SystemExit
        ManagedProcess.launch = launch
        sys.argv[1:] = ["train", {str(config)!r}, "--set=engine.kind=embedded_server", "--set=bridge.kind=broadcast"]
        main()
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG_S)
    assert done.stdout == "serve False\n", done.stderr


def test_a_server_of_vllm_says_what_transformers_goes_without_before_that_is_imported(tmp_path: Path):
    """Which looks once for what is installed: hidden from it after that, a library of pictures ends it."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    code = f"""if True:
        import sys
        import lachesis.plugins.serving.vllm_launch as launch
        from lachesis.cli import main
        launch.serve = lambda arguments: print(*launch.needless(arguments))
        sys.argv[1:] = ["serve", "--model", {str(tmp_path)!r}]
        main()
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG_S)
    assert done.stdout == "sklearn cv2 torchvision\n", done.stderr


def test_reading_a_configuration_is_quick_and_loads_no_framework():
    program = (
        "import sys, time\n"
        "import lachesis.config.load, lachesis.config.rules, lachesis.plugins.dialects.explain\n"
        "heavy = {'torch', 'transformers', 'vllm', 'peft', 'datasets', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'{heavy} {time.process_time()}' if heavy or time.process_time() > 1.0 else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LONG_S)
    assert done.returncode == 0, done.stderr


def test_the_package_is_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "lachesis", "--version"],
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


def test_how_threads_wait_is_said_before_torch_is_loaded():
    program = (
        "import os, sys, lachesis\nassert 'torch' not in sys.modules and 'GOMP_SPINCOUNT' not in os.environ\n"
        "lachesis.Policy\nassert 'torch' in sys.modules\nprint(os.environ['GOMP_SPINCOUNT'])\n"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    words = [sys.executable, "-c", program]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=LONG_S, check=True)
    assert ended.stdout == "5000\n"


def test_transformers_does_not_import_torchao_where_it_is_kept_from_it():
    """As it is from a server that has no use for it."""
    code = (
        "import sys; sys.modules['torchao'] = None; import transformers.modeling_utils; "
        "from transformers.utils import is_torchao_available; print(is_torchao_available())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False"]
