"""Resumable sources, readers of data files, and packing (np).

file or TFDS data set -> `row_files.read` -> `rows.Row` -> (an environment's
tasks) -> `sources.Shuffled`; samples -> `packing`; pairs -> `preferences`
"""
