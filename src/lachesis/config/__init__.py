"""The configuration: reads a file of any known dialect into one checked record, and describes it. No torch."""
