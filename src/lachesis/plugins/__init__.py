"""Products beside the core: a run loads those that its configuration names, and no other."""
