"""Atropos: the rollout API, environments, the source of their rollouts, and the trainer's flags."""
