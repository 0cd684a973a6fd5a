"""Pallas kernels and their jnp oracles. This file must import nothing.

    attention         the public functions: attention, cached, decode
    reference         their oracles: same signatures, plain jnp
    options           the static options of a kernel
    masks             intervals of keys, and the blocks that they cover
    tiles             the computation on one tile, shared by all kernels
    flash             forward and backward as one function with a gradient
    flash_triton      its kernels for GPUs
    flash_tpu         its kernels for TPUs
    decode_triton     one query per row, split over keys, for GPUs
    decode_tpu        one query per row, for TPUs
    _compat           differences between versions of jax and backends

`tests/kernels` checks on every CPU the values and gradients of every kernel,
interpreted, against the oracles; and that every kernel lowers for an H200, a
v5e and a v6e. Tests marked `gpu` compare the compiled kernels on a GPU. Speed
is not tested; block sizes and warps are not tuned.

`transformers` looks for an importable package named `kernels` and reads its
version; it ignores one below 0.9 as too old.
"""

__version__ = '0.2.0'
OWNER = 'posttrain'
