"""Rewards that run code of a model."""
