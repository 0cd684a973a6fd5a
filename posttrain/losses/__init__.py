"""Losses: pure functions of arrays. No model, no config object, no flax.

A core returns `(sum, metrics)`: the sum over its member tokens, not their
mean, and metrics as `(sum, count)` pairs; `combine` divides.
"""
