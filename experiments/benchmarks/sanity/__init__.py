"""Whether every loss learns all it can learn; see `__main__`."""
