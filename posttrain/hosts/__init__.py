"""The processes of a run: how they join, and how they end together."""
