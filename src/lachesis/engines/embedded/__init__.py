"""Generation with a model in this process: requests and a model in, completions out.

Independent of servers.
"""
