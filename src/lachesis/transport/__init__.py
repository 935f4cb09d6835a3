"""Transport of tensors between processes: a channel of broadcasts, or memory that both sides map.

Named tensors go in on the trainer's side and come out on the engine's; nothing here knows a model or an engine.
"""
