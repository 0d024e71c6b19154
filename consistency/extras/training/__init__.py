"""Training by several devices, and the steps of one training."""
