"""Environments that play episodes with the engine: steps, verifiers, agents."""
