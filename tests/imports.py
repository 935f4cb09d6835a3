"""What most commands of ours come to import, for processes that are forked."""

from __future__ import annotations

import atexit
import gc
import os

from lachesis.common.openmp import brief_waits

# As the command line has it before torch is loaded.
os.environ |= brief_waits(os.environ)

import peft
import transformers.models.qwen2.modeling_qwen2
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import lachesis.cli
import lachesis.plugins.atropos.environments.shipped.arithmetic
import lachesis.plugins.atropos.environments.shipped.gsm8k
import lachesis.plugins.atropos.services
import lachesis.plugins.embedded_server.app
import lachesis.plugins.export.export
import lachesis.plugins.serving.serve
import lachesis.run.train
from tests import warm

__all__ = [
    "AutoModelForCausalLM",
    "AutoTokenizer",
    "PreTrainedTokenizerFast",
    "lachesis",
    "peft",
    "transformers",
    "warm",
]

# The garbage collector writes into what it looks through, which then would be no longer shared.
gc.freeze()
# Libraries that are taken down at the end say at length what they have leaked.
atexit.register(os._exit, 0)
