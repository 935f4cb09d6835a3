"""The engine serves the trainer's weights, and proves it: a policy and its version go in, an engine that generates
under that version comes out.
"""
