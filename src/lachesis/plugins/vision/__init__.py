"""Images in prompts: read from a dataset, made into a model's inputs once, shown to the engine and in training."""
