"""Where groups of completions with rewards come from: datasets and reward functions here, environments elsewhere."""
