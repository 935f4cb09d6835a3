"""Named benchmarks: what they consist of, their evaluation in a run and by ``lachesis eval``, and comparisons."""
