"""Training on several devices: one process, a rank, for each.

Rank 0 is the *leader*: it has the engine, the data, the rewards, the checkpoints and the loop, as a run of one process
has. The other ranks are *followers*: they hold their part of the model and take part in what the leader's policy does,
one command after the other (:mod:`~lachesis.train.distributed.leading`, :mod:`~lachesis.train.distributed.following`).
Tensors travel by torch's collectives, commands and news of a death by connections of their own
(:mod:`~lachesis.train.distributed.links`).
"""
