"""Server of the Tinker protocol: requests of the PyPI client ``tinker`` come in, its kinds of answer go out.

LoRA adapters of several training runs share one base model; each has its own optimizer. ``adapters``,
``training`` and ``sampling`` compute, one thing at a time in the thread of ``worker``; ``checkpoints`` are files;
``wire`` and ``routes`` speak the protocol.
"""
