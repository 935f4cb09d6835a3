"""Rollouts by programs unaware of training: each talks to a recording proxy as if it were OpenAI or Anthropic."""
