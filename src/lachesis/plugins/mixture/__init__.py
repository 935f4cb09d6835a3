"""Several sources in one run: their configuration, the mixture of their groups, and each one's metrics."""
