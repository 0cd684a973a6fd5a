"""What recipes learn, over seeds, from the same starts; see `__main__`."""
