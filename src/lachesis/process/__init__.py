"""Processes and threads: children that end with their parent, supervision, workers."""
