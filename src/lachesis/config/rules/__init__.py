"""Checks across sections, made before anything is loaded. They never change a value.

A rule reports findings under its function's name. A ``problem`` is a combination that cannot work or has no effect, a
``warning`` one that works differently from what most users expect, a ``note`` a fact worth knowing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lachesis.common.types import Finding
from lachesis.config.problems import config_error
from lachesis.config.rules.base import Rule, found_by
from lachesis.config.rules.inputs import INPUT_RULES
from lachesis.config.rules.pipeline import PIPELINE_RULES
from lachesis.config.rules.serving import SERVING_RULES
from lachesis.config.rules.table import rows, rule
from lachesis.config.rules.training import TRAINING_RULES, learning_rate
from lachesis.config.schema import LachesisConfig
from lachesis.plugins import load

__all__ = ["RULES", "check", "learning_rate"]

RULES: tuple[Rule, ...] = (*INPUT_RULES, *TRAINING_RULES, *PIPELINE_RULES, *SERVING_RULES, *map(rule, rows()))


def check(
    config: LachesisConfig, *, located: Callable[[str], str] = str, name: str = "the configuration"
) -> list[Finding]:
    """Return the warnings and notes of all rules.

    Args:
        config: the configuration.
        located: adds to a problem where its keys are in the file (:attr:`lachesis.config.load.LoadedConfig.located`).
        name: the configuration's name in errors, such as the path of its file.

    Raises:
        ConfigError: the configuration cannot work; the message lists every problem.
    """
    find = partial(found_by, RULES)
    findings = list(load("sources", "mixture_findings")(config, find) if config.sources else find(config))
    problems = [located(finding.message) for finding in findings if finding.level == "problem"]
    if problems:
        raise config_error(f"{name} cannot work", problems)
    return findings
