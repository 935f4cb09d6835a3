"""Inference engines: token ids of prompts go in; completions with logprobs and weight versions come out.

``embedded`` runs in this process, ``vllm`` and ``embedded.server`` are servers, ``serving`` is shared by both servers,
and ``http`` is the trainer's side of them.
"""
