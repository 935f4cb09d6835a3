"""Health rules: the values and groups of a step come in; findings that name a fault and a remedy go out.

A new rule is one function with the decorator ``rule`` in rules.py.
"""
