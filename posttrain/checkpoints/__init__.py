"""Checkpoints of runs, and weights by path: a run, HuggingFace, PEFT."""
