"""A model behind a server: HTTP, answers, the check, an engine."""
