"""Runs, each built from a configuration and watched to its end; the only room that names concrete classes."""
