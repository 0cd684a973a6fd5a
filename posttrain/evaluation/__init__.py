"""Measuring a policy on held-out tasks, and comparing two policies."""
