"""From prompts to batches: groups of scored completions are asked for, filtered, kept for replay and handed to the
trainer in order, while it trains on the ones before.
"""
