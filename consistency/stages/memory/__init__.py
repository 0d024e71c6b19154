"""Stage `memory`."""
