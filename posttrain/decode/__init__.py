"""Token generation: the KV cache, sampling, and the slot engine."""
