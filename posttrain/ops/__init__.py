"""Array operations with more than one implementation.

The only importer of `kernels`. Models and decoding call these functions and
never choose an implementation.
"""
