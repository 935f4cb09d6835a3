"""What a run will take: memory, cards, time; and what fits."""
