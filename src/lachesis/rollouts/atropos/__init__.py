"""Groups that environments have sent to the rollout API of Atropos, as the trainer's own records."""
