"""The command ``plan``: what a run takes, what fits on a card, what it costs on many."""
