"""Notebooks, and scripts that read a run."""
