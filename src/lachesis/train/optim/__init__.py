"""Optimizers, learning-rate schedules, and updates of weights that are stored rounded."""
