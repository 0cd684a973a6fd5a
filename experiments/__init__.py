"""Launchers, notebooks and benchmarks; they may import anything."""
