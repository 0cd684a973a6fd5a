"""Numbers of a run: their writers, statistics of rollouts, estimates (np)."""
