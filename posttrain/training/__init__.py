"""The jitted train step, its state, objectives and optimizer."""
