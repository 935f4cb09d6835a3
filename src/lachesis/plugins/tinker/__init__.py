"""The Tinker protocol: what the client ``tinker`` of PyPI asks for comes in, its own kinds of answer go out.

LoRA adapters of several training runs hang on one base model, each with an optimizer of its own. ``adapters``,
``training`` and ``sampling`` compute, one thing at a time in the thread of ``worker``; ``checkpoints`` are files;
``wire`` and ``routes`` speak the protocol.
"""
