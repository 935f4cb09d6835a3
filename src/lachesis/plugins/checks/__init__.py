"""What a run needs of its machine and its network, tried before there is a run.

In: a configuration. Out: a :class:`~lachesis.plugins.checks.findings.Check` a line, with what to do where it failed.
"""
