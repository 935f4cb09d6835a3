"""Teachers behind an address: their logprobs of a batch are written into its samples before they are packed."""
