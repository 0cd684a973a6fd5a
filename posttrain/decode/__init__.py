"""Tokens out of a model: the KV cache, sampling, and the slot engine."""
