"""Post-training of language models in JAX: SFT and RL."""

from posttrain.util.release import __version__ as __version__
