"""Training on several devices: one process (rank) for each, started by torchrun.

Rank 0 is the *leader*: like a run of one process it has the engine, the data, the rewards, the checkpoints and the
loop. The other ranks are *followers*: each has its part of the model, in an ordinary
:class:`~lachesis.train.policy.Policy`. The leader's policy (:class:`~lachesis.train.distributed.leader.LeadingPolicy`)
announces each joint call as a named, numbered turn; followers call the same method of their policies, and answer.
Turns, answers and notices of a rank's death go through a separate gloo process group
(:mod:`~lachesis.train.distributed.control`), tensors through the default one, which is gloo or NCCL. After a restart by
torchrun the ranks meet anew, and the run resumes from its last checkpoint.
"""
