"""Stage `shards`."""
