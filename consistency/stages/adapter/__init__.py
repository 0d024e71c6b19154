"""Stage `adapter`."""
