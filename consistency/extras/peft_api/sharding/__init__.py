"""Stage `sharding`."""
