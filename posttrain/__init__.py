"""Post-training of language models in JAX: SFT and RL."""

from posttrain.util import streams
from posttrain.util.release import __version__ as __version__

# Before any import opens a file: it would get the number of a closed stream,
# and what libraries print would go into it.
streams.open_closed()
