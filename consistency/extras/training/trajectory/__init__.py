"""Stage `trajectory`."""
