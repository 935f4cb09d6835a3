"""The rollout API: environments push scored groups, a trainer pulls batches. No torch in this room.

In come HTTP requests, out go replies, the dashboard and, if asked for, a journal that survives the process.
"""
