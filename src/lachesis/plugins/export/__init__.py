"""A run's model for others: files of transformers, peft and llama.cpp, a card, the hub."""
