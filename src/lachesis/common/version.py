"""Version of this package, where every room may import it."""

__version__ = "0.1.0"
