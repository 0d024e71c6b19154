"""Training an adapter: backward passes and steps of the optimizer."""
