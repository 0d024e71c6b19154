"""Stage `gradient`."""
