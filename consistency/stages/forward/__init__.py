"""Stage `forward`."""
