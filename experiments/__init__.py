"""Launchers, notebooks and benchmarks: may import anything."""
