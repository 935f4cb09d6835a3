"""Services that a run's metrics are sent to."""
