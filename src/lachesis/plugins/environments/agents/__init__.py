"""Rollouts by programs that know nothing of training: each talks to a recording proxy as to OpenAI or Anthropic."""
