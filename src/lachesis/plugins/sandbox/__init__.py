"""Sandboxes for code that a model wrote: rewards, tools and environments run such code only through this package.

:func:`open_sandbox` returns a sandbox with the best wall that works here. It runs a :class:`Program` with its input and
returns what it printed, or a :class:`FunctionTests`, whose statements run out of the code's reach.
"""
