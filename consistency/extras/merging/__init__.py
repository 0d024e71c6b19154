"""Commands that read files of weights and run no model: `consistency check-merged` and `consistency diff`."""
