"""Pages: what the report of a run, the rollout API's dashboard and the environments' page of rollouts share.

In come a page's own template and its values, out goes one HTML file that loads nothing.
"""
