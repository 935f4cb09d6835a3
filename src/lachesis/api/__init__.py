"""The rollout API: environments push scored groups, a trainer pulls batches. No torch in this room."""
