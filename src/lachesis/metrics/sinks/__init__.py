"""Sinks of step records, such as files and consoles; each is a :class:`lachesis.metrics.hub.Sink`.

A new sink is a module here and a line in run/sinks.py, which turns sinks on by the configuration.
"""
