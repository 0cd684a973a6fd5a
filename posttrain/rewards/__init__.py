"""Checkers of answers, graders of any text: pure functions of texts (np)."""
