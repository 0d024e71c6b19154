"""The pytest plugin: options, one run for all xdist workers, one item per tensor and device."""
