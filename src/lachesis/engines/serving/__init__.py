"""The HTTP contract of an inference server: one implementation of the routes over any engine."""
