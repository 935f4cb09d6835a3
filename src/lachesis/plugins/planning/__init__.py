"""Command ``plan``: memory and disk of a run, fit to a card, and cost on many."""
