"""`consistency check-merged`: whether a folder of merged weights, by whatever writer, holds base + adapter."""
