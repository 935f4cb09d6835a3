"""Rollouts by programs unaware of training: each talks to a recording proxy as to OpenAI or Anthropic."""
