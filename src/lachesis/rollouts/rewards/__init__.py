"""Completions in, rewards out: functions that a configuration names, reward models, and the limits they run under."""
