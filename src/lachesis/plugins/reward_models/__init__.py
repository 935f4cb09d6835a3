"""Sequence-classification models as reward functions."""
