"""The model and how it is run: loaded from a checkpoint, adapted, and evaluated to logprobs of packed sequences."""
