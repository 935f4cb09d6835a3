"""Lachesis: a GRPO trainer for language models.

Its rooms, from the top down; each imports from those below it:
cli, run, config, train, bridges, pipeline, rollouts, environments, engines, transport, api, metrics, web, common.
"""

from lachesis.common.renamed import keep_old_names

__version__ = "0.1.0"

keep_old_names()
