"""Export of a run's model: files for transformers, peft and llama.cpp, a model card, the hub."""
