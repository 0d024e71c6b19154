"""Stage `base`."""
