"""Runs of several processes, placed and restarted by Ray."""
