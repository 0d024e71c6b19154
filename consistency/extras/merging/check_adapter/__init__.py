"""`consistency check-adapter`: whether a saved adapter is whole and trained, and fits its config and a base."""
