"""The trainer's side of inference servers: calls go out as HTTP, answers come back as records or as errors."""
