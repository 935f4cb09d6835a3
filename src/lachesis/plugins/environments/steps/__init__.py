"""Environments that the model plays turn by turn, whatever interface they were written for."""
