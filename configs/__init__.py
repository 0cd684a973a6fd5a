"""Recipes: one file each, loaded by path; `common` makes the ConfigDict."""
