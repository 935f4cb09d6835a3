"""The rollout API, the same as Atropos's: a server between environments and trainer.

In come scored groups of environments; out go batches of them for the trainer, none lost. No torch in this room.
"""
