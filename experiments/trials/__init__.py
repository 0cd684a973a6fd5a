"""Trials of `experiments.faults`, one module per place of the fault."""
