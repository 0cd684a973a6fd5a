"""Trials: one per promise about faults; `python -m experiments.trials`."""
