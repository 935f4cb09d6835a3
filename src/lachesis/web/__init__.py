"""What pages share: the report of a run, the rollout API's dashboard and the environments' page."""
