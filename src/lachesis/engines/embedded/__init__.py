"""Generation with a module in this process: requests and a model in, completions out.

Knows no server.
"""
