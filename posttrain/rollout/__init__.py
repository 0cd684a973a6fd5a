"""Where rollouts come from: demonstrations replayed, or episodes played."""
