"""Shared parts of the HTML pages: the run report, the live page and the page of rollouts.

A page's template and its values go in; one HTML file that loads nothing else comes out.
"""
