"""Writers of metrics, statistics of rollouts, estimates with intervals (np)."""
