"""Memory, traffic and predicted speed of runs on devices that are not here.

`python -m experiments.scale`; see `experiments/results/scale.md`.
"""
