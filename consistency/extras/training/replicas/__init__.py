"""Stage `replicas`."""
