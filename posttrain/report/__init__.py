"""The picture of a run: one HTML page from what the run wrote."""
