"""One run after another: history, drift, accepted findings."""
