"""Training algorithm: scored batches come in; optimizer steps, checkpoints and metrics go out."""
