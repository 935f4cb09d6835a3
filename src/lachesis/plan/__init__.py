"""Planning of a run: its memory, cards and time, and the changes that make it fit."""
