"""A run on several nodes: which of them does what, as the configuration says, and the files that start it there.

``layout`` derives one record from the configuration and the machines; ``slurm`` is a pure function
from records to text. Nothing here asks a scheduler for anything.
"""
