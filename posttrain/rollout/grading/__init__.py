"""Reward functions and reward models of the rollouts (np but models)."""
