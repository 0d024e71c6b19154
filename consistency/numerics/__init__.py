"""Pure functions on tensors of any device: digests, differences, bounds, diagnosis. No I/O."""
