"""The embedded engine as a server: the same HTTP contract as vLLM's, on any machine."""
