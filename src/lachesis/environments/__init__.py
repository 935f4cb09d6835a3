"""Environments: programs that sample rollouts, score them, and push them to a rollout API. No torch in this room."""
