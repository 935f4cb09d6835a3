"""Each format that weights and products come in: its rounding, its gradients, and that a model learns in it."""
