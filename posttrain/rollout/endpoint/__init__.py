"""A model on a server: HTTP client, responses, checks, and an engine."""
