"""Sources of groups of completions with rewards: datasets and reward functions here, environments elsewhere."""
