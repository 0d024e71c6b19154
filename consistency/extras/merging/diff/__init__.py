"""Two weight files or model folders, without any model code."""
