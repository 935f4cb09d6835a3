"""Our routes, worker extension and aliases inside vLLM's own server. Nothing of vLLM is patched."""
