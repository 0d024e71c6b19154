"""Stage `operators`."""
