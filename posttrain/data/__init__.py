"""Where tasks come from: resumable sources, and readers of data files (np).

file -> `jsonl.read` or `tfds.read` -> `rows.Row` -> (an environment's
tasks) -> `sources.Shuffled`
"""
