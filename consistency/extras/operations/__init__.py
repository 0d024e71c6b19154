"""Keeping watch: a run that repeats for hours."""
