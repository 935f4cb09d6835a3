"""Turn prompts into batches, in order, while the trainer works on earlier ones.

Groups of scored completions are requested, filtered, kept for replay and handed to the trainer.
"""
