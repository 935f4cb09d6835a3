"""An environment of Atropos' repository, as it is: ``PYTHON -E atropos_script.py PACKAGES SCRIPT serve ...``.

It runs in the Python that has atroposlib and knows nothing of ours. ``PACKAGES`` is a directory whose packages are
found behind its own: what environments import beside atroposlib, such as ``datasets``.
"""

import functools
import os
import runpy
import sys

from transformers import PreTrainedTokenizerBase

HERE = os.path.dirname(os.path.abspath(__file__))


def main() -> None:
    """Run the script as the main program."""
    _, packages, script, *words = sys.argv
    sys.argv = [script, *words]
    # In place of this script's directory its own, as Python has it.
    sys.path[0] = os.path.dirname(script)
    sys.path += [os.path.join(HERE, "atropos_stand_ins"), packages]
    # atroposlib 0.4.0 counts on this default, which transformers 5 changed: its tokenize_for_trainer fails without it.
    template = PreTrainedTokenizerBase.apply_chat_template
    PreTrainedTokenizerBase.apply_chat_template = functools.partialmethod(template, return_dict=False)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
