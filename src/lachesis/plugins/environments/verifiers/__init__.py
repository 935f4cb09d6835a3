"""Environments of the library verifiers, versions 0.1 and 0.4, unchanged: their tasks, tools and rubrics."""
