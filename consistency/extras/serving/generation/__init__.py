"""Stage `generation`."""
