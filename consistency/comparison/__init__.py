"""Captures to a comparison: rows, classes of agreement, findings. Never imports the worker."""
