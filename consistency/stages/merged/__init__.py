"""Stage `merged`."""
