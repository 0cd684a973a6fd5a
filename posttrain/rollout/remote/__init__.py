"""Environments and reward functions in worker processes; see `remote`."""
