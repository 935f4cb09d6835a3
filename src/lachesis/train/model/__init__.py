"""Model and its evaluation: loaded from a checkpoint, adapted, and run to logprobs of packed sequences."""
