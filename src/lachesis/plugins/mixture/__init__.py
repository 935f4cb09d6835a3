"""Several sources in one run: their configuration, the mixture of their groups, and what is said of each."""
