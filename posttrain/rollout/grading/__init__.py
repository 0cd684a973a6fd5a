"""Rewards of rollouts: functions, judges, reward models."""
