"""Adapters of environments from other libraries.

    type       environment                                  needs posttrain[...]
    openenv    a server of OpenEnv, over its WebSocket      openenv
    verifiers  a v1 taskset of `verifiers`, in one turn     verifiers
    trl        a class of TRL's `environment_factory`       -

Not supported:

    openenv    http:// urls (every step would have an environment of its own),
               sessions of MCP and of harnesses, options of `reset` other than
               the seed
    verifiers  everything that needs its harness: rewards and metrics with a
               `runtime`, containers, `setup` and `finalize`, tools, further
               turns, images, a package's own `Env`; versions before 0.4
    trl        several classes in one environment (a run may have several
               environments), images, reward functions with an argument
               `environments`

A server may ignore the seed, and classes of TRL are not seeded: if they draw
random numbers, two runs with one seed differ.
"""
