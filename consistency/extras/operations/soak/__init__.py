"""A soak: after the stages, the same is computed again and again until the time is up."""
