"""Teachers behind an address: what they say of a batch is written into its samples before they are packed."""
