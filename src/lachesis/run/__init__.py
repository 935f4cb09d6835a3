"""Runs: builds the parts of a run from its configuration and runs it. The only room that names concrete classes."""
