"""Environments: programs that have problems, let a model work on them, and score the results.

In come completions of inference servers; out go scored groups, to a rollout API or a file. No torch in this room.
"""
