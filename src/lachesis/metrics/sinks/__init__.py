"""Where step records go: files, consoles, TensorBoard, Weights & Biases; each module is one :class:`base.Sink`.

A new sink is a module here and a line in run/sinks.py, which decides from the configuration what is on.
"""
