"""The soak: after the stages of a case, compute the same again until the time is up, and compare the bits."""
