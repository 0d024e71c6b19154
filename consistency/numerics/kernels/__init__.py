"""The compiled and the Triton kernel, the NumPy paths that they are checked against, and when either may be used."""
