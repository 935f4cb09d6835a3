"""A run on several nodes: which of them does what, as the configuration says, and the files that start it there.

``layout`` derives one record from the configuration and the machines; ``slurm`` and ``kubernetes`` are pure functions
from records to text. Nothing here asks a scheduler for anything.
"""
