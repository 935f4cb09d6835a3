"""Images in prompts: read from a dataset, turned into a model's inputs once, and used by the engine and in training."""
