"""Pallas kernels and their jnp oracles; imports nothing, on purpose.

`transformers` looks for an importable package named `kernels` and reads its
version; below 0.9 it takes this one for too old and leaves it alone.
"""

__version__ = '0.1.0'
OWNER = 'posttrain'
