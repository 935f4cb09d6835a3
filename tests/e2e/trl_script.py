"""A script of TRL's with its import changed: ``python -m tests.e2e.trl_script SCRIPT [WORDS]``.

``trl``, whose other names they use, is found behind the packages of this Python. A script's training is cut short.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

from lachesis.plugins.trl import GRPOConfig, RLOOConfig
from tests.paths import ROOT

TRL = ROOT / ".venv-trl"
SHORT = {"max_steps": 2, "max_completion_length": 24, "use_vllm": False}
TURNS = {"max_tool_calling_iterations": 1}  # RLOO has no tools


def main() -> None:
    """Run the script as the main program."""
    sys.argv.pop(0)
    script = Path(sys.argv[0])
    sys.path.insert(0, str(script.parent))
    sys.path.append(str(TRL))
    cut_short()
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__file__ = str(script)
    exec(compile(changed(script.read_text()), script, "exec"), module.__dict__)


def changed(text: str) -> str:
    """Return a script that imports the names of ``trl`` from ``lachesis.trl``."""
    return re.sub(r"^(\s*)from trl import", r"\1from lachesis.trl import", text, flags=re.M)


def cut_short() -> None:
    """Let the arguments of training say less than a script does, and nothing be reported elsewhere or published."""
    settle = GRPOConfig.__post_init__

    def cut(arguments: GRPOConfig) -> None:
        for name, most in (SHORT if isinstance(arguments, RLOOConfig) else SHORT | TURNS).items():
            value = getattr(arguments, name)
            if value is None or value > most or value < 0:
                setattr(arguments, name, most)
        arguments.report_to, arguments.push_to_hub, arguments.use_cpu = [], False, True
        settle(arguments)

    GRPOConfig.__post_init__ = cut


if __name__ == "__main__":
    main()
