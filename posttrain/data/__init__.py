"""Resumable sources, readers of data files, and packing (np).

file -> `jsonl.read` or `tfds.read` -> `rows.Row` -> (an environment's
tasks) -> `sources.Shuffled`; samples -> `packing`; pairs -> `pair_packing`
"""
