"""Commands of Atropos: ``grpo``, ``run`` and ``env``."""
