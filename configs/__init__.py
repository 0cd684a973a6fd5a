"""Recipes, one file each, loaded by path.

`machinery` makes the ConfigDict, `common` holds pieces that recipes share.
"""
