"""Stage `collectives`."""
