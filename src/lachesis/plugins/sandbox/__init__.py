"""Runs code of a model behind walls: rewards, tools and environments that run such code do so by this package alone.

:func:`open_sandbox` gives one with the best wall that works here. It runs a :class:`Program` with its input and tells
what it printed, or a :class:`FunctionTest`, whose statements run where the code cannot reach them.
"""
