"""Checks of a run's needs on its machine and its network, before there is a run.

In: a configuration. Out: a :class:`~lachesis.plugins.checks.findings.Check` a line, with a remedy if it failed.
"""
