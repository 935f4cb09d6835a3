"""Spellings that configurations had before: translated with a warning, or refused with what to write in their place.

Run directories hold whole configurations, so keys that are gone are taken out of them.
"""

from __future__ import annotations

from typing import Any

from lachesis.common.json_values import is_object
from lachesis.common.types import Finding
from lachesis.config.document import Document

VESPO = (
    "VESPO is an example of a loss of your own now: write algorithm.loss: vespo.py:vespo beside a copy of "
    "examples/losses/vespo.py, and loss_type: dapo"
)
LORA_RESTART = (
    "lora_restart is lora_only now: the engine is not started again, and takes the adapter while it runs, with its "
    "CUDA graphs and with proof"
)
_GONE = (("algorithm", "vespo_k_pos"), ("algorithm", "vespo_lambda_pos"), ("algorithm", "vespo_k_neg"),
         ("algorithm", "vespo_lambda_neg"))  # fmt: skip


def take_over(document: Document) -> list[Finding]:
    """Put what is written today in the place of earlier spellings of our keys; return a warning for each."""
    found: list[str] = []
    algorithm = _section(document, "algorithm")
    if algorithm.get("loss_type") == "vespo":
        document.problems.append(f"algorithm.loss_type{document.at(('algorithm', 'loss_type'))}: {VESPO}")
        del algorithm["loss_type"]
    if algorithm.get("loss_type") == "luspo":
        algorithm |= {"loss_type": "grpo", "normalization": algorithm.get("normalization") or "sequence_sum"}
        found.append("algorithm.loss_type luspo is loss_type: grpo with normalization: sequence_sum now")
    bridge = _section(document, "bridge")
    if bridge.get("kind") == "lora_restart":
        bridge |= {"kind": "lora_only", "every_steps": bridge.get("every_steps") or 3}
        found.append(f"bridge.kind {LORA_RESTART}")
    rewards = _section(document, "rewards")
    if rewards.get("sandbox") == "bubblewrap":
        rewards["sandbox"] = "namespaces"
        found.append("rewards.sandbox bubblewrap is namespaces now, the same wall without the program")
    for section, key in _GONE:
        _section(document, section).pop(key, None)
    return [Finding(level="warning", rule="spelling", message=text) for text in found]


def _section(document: Document, name: str) -> dict[str, Any]:
    section = document.data.get(name)
    return section if is_object(section) else {}
