"""Where step records go: files, consoles, TensorBoard, Weights & Biases; each is a :class:`lachesis.metrics.hub.Sink`.

A new sink is a module here and a line in run/sinks.py, which decides from the configuration what is on.
"""
