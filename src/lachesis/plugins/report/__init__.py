"""Report of a run: config.yaml, metrics.jsonl and the tape come in, report.html goes out."""
