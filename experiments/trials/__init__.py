"""Trials of `experiments.trials`, one module per place of the fault."""
