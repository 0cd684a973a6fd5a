"""Post-training of language models in JAX: SFT, RL and distillation."""

__version__ = '0.1.0'
