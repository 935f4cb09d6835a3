"""Bridges, which bring the trainer's weights to the engine and prove that they arrived.

A policy and its version go in; an engine that generates under that version comes out.
"""
