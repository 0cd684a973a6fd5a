"""Rewards: pure functions of what was said and what is right (np)."""
