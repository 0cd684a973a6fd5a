"""Environments that others wrote, played by our driver.

    type       what it plays                                needs posttrain[...]
    openenv    a server of OpenEnv, over its WebSocket      openenv
    verifiers  a v1 taskset of `verifiers`, in one turn     verifiers
    trl        a class of TRL's `environment_factory`       -

What is not supported:

    openenv    http:// urls (every step would have an environment of its own),
               sessions of MCP and of harnesses, options of `reset` other than
               the seed
    verifiers  what needs its harness: rewards with a `runtime`, containers,
               `setup` and `finalize`, tools, further turns, images; versions
               before 0.4
    trl        several classes in one environment (a run may have several
               environments), images, reward functions that ask for
               `environments`, the chat template's own form of tool calls

A server may ignore the seed, and nobody seeds a class of TRL: where they draw
by chance, two runs differ, whatever their seed.
"""
