"""Environments: sources of tasks, and graders of answers (np)."""
