"""The configuration: a file of any known dialect, read into one checked record and described in words. No torch."""
