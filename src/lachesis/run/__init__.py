"""One run, put together from a configuration and watched to its end: the place that names concrete classes."""
