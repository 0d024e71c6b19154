"""The report of a suite: one line per case, and findings that cases have in common once."""
