"""Checkers of answers: pure functions of text and gold answer (np)."""
