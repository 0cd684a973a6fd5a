"""Post-training of language models in JAX: SFT and RL."""

__version__ = '0.2.0'
