"""Where rollouts come from: one sampler per environment."""
