"""A run on several nodes: the role of each node, by the configuration, and the files that start the run there.

``layout`` derives one record from the configuration and the machines; ``slurm`` is a pure function
from records to text. No module here talks to a scheduler.
"""
