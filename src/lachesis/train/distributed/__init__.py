"""Training on several devices: one process, a rank, for each, started by torchrun.

Rank 0 is the *leader*: it has the engine, the data, the rewards, the checkpoints and the loop, as a run of one process
has. The other ranks are *followers*: each has its part of the model, in a :class:`~lachesis.train.policy.Policy` like
any other. Whatever all ranks have to call together the leader's policy
(:class:`~lachesis.train.distributed.leader.LeadingPolicy`) announces as a named, numbered turn; followers call the
same method of theirs, and answer. Turns, answers and the news of a death go through a gloo process group of their own
(:mod:`~lachesis.train.distributed.control`), tensors through the default one, which is gloo or NCCL. After a restart
by torchrun ranks meet anew, and the run goes on from its last checkpoint.
"""
