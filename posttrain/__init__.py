"""Post-training of language models in JAX: SFT and RL."""

__version__ = '0.1.0'

from posttrain.util import streams

# Before any import opens a file: it would get the number of a closed stream,
# and what libraries print would go into it.
streams.open_closed()
