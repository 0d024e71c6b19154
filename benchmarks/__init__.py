"""What is measured by hand and written down in `docs/`: run each with `python -m benchmarks.NAME` from here."""
