"""Faults of other libraries that were found and settled: a finding that is one of them says so."""
