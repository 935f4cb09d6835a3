"""The algorithm: batches of scored completions come in, optimizer steps, checkpoints and metrics go out."""
