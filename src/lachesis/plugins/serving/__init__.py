"""The commands ``serve`` and ``vllm-serve``: an inference server on its own, until a signal ends it."""
