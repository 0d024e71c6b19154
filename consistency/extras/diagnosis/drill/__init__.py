"""The drill: faults are planted, and each has to be found and named."""
