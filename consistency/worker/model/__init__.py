"""Base and adapter in this process: loading, files, inputs, float64 reference."""
