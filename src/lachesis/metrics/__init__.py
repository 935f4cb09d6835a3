"""Metrics of a run: typed values of a step come in, are merged and reduced once, and go out as one record.

The record goes to the health rules, which add findings, and then to every sink.
"""
