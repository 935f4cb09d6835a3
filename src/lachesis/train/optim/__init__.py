"""From gradients to new weights: optimizers, learning-rate schedules, and steps on weights that are stored rounded."""
