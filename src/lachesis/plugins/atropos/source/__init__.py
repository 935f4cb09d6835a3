"""The trainer's side of a rollout API: batches of scored groups come in, groups that can be trained on go out."""
