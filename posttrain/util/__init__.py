"""Flags, timers, errors, imports, preemption, logs, host memory (np)."""
