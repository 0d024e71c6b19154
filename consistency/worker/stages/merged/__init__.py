"""Stage `merged`: deltas and merged weights."""
