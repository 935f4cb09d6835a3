"""Lachesis: a GRPO trainer for language models."""

from lachesis.common.renamed import keep_old_names

__version__ = "0.1.0"

keep_old_names()
