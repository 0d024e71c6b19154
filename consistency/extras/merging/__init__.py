"""What is in a file or a folder of weights: `consistency check-merged` and `consistency diff`. Neither runs a model."""
