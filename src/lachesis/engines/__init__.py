"""What generates: token ids of prompts come in, completions with logprobs and weight versions go out.

``embedded`` runs in this process, ``vllm`` and ``embedded.server`` are servers, ``serving`` is what both servers offer,
and ``http`` is the trainer's side of it.
"""
