"""Environments of the library verifiers, of its line 0.1 and of today's, unchanged: their tasks, tools and rubrics."""
