"""Stage `adapters`."""
