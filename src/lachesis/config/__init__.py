"""From a file of any known dialect to one checked record, and back to words. Imports no torch."""
