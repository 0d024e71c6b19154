"""Stage `tensor-parallel`."""
