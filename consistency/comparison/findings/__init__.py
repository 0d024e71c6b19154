"""Rows to findings: sentences that somebody can act on."""
