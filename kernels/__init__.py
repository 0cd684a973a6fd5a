"""Pallas kernels and their jnp oracles; imports nothing, on purpose.

    attention         the public functions: attention, cached, decode
    reference         their oracles: same signatures, plain jnp
    masks             intervals of keys; which blocks they leave alive
    tiles             the mathematics on one tile, shared by all kernels
    flash             forward and backward as one function with a gradient
    flash_triton      its kernels for GPUs
    flash_tpu         its kernels for TPUs
    decode_triton     one query per row, split over keys, for GPUs
    decode_tpu        one query per row, for TPUs
    _compat           what differs between versions of jax

Proven by `tests/kernels`, on every CPU: the numbers and gradients of every
kernel, interpreted, against the oracles; and that every kernel lowers for an
H200, a v5e and a v6e. Tests marked `gpu` compare the compiled kernels on a
GPU. No speed is claimed; blocks and warps are first guesses.

`transformers` looks for an importable package named `kernels` and reads its
version; below 0.9 it takes this one for too old and leaves it alone.
"""

__version__ = '0.1.0'
OWNER = 'posttrain'
