"""Pure functions on tensors of any device: digests, differences, bounds, diagnosis."""
