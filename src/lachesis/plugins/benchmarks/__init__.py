"""Named benchmarks: their contents, their evaluation in a run and by ``lachesis eval``, and comparisons."""
