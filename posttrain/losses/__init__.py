"""Losses: pure functions of arrays. No model, no flax.

Defaults of keywords are those of the options in `posttrain.schema`.

The core of a component returns `(terms, metrics)`: one weighted term per
token, exactly 0 at non-members, and metrics as `(sum, count)` pairs. `combine`
sums the terms and divides by the global count. `preference` and `ranking`
return one term per pair, or per answer.
"""
