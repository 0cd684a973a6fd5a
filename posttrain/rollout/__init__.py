"""Rollouts: samplers, the episode driver, transcripts, model references."""
