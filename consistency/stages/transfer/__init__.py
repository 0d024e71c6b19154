"""Stage `transfer`."""
