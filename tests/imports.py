"""What most commands of ours come to import, for processes that are forked."""

from __future__ import annotations

import atexit
import gc
import os
import tempfile
from pathlib import Path

from lachesis.process.openmp import brief_waits

# As the command line has it before torch is loaded.
os.environ |= brief_waits(os.environ)

import numpy.ma
import peft
import transformers.models.qwen2.modeling_qwen2
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import lachesis.cli.training
import lachesis.plugins.atropos.environments.shipped.arithmetic
import lachesis.plugins.atropos.environments.shipped.gsm8k
import lachesis.plugins.atropos.services
import lachesis.plugins.embedded_server.app
import lachesis.plugins.export.export
import lachesis.plugins.serving.serve
import lachesis.run.start
import lachesis.run.train
from lachesis.config.load import load_config
from lachesis.plugins.checks.doctor import write_proof
from lachesis.plugins.report.page import TEMPLATE
from lachesis.process.garbage import freeze
from lachesis.web.pages import _environment
from tests import warm

__all__ = [
    "AutoModelForCausalLM",
    "AutoTokenizer",
    "PreTrainedTokenizerFast",
    "lachesis",
    "numpy",
    "peft",
    "transformers",
    "warm",
]

# What each of them would work out anew: the keys of the schema, and the templates of a report.
with tempfile.TemporaryDirectory() as directory:
    load_config(write_proof(Path(directory)))
for name in _environment(TEMPLATE.parent).list_templates(extensions=["j2"]):
    _environment(TEMPLATE.parent).get_template(name)
# The garbage collector writes into what it looks through, which then would be no longer shared.
gc.freeze()
freeze()  # which counts what is frozen, as each of them would
# Libraries that are taken down at the end say at length what they have leaked.
atexit.register(os._exit, 0)
