"""Every option of the program, as frozen dataclasses. Numpy-free, jax-free.

Each field has a comment, its default, and its bounds in its annotation, see
`bounds`; what relates several fields is checked in `__post_init__`, and what
spans nodes in `posttrain.config.checks`. A node with a `type` is a union of the
option classes of its registry, such as `schema.Algorithm`; the implementations
are the dict `TYPES` of another package, by the same types.

The names of the modules are distinct, and all are exported here: a new class
needs no line in this file.
"""

from posttrain.schema.architecture import *
from posttrain.schema.bounds import FieldError
from posttrain.schema.objective import *
from posttrain.schema.run import *
from posttrain.schema.signals import *
from posttrain.schema.tasks import *
