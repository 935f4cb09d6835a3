"""Health rules: the values and groups of a step come in, findings that say what is wrong and what to change go out.

A new rule is one function with the decorator ``rule`` in rules.py.
"""
