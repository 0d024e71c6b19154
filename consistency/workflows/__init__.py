"""Workflows that a user asks for as a whole, composed of other packages: run, suite, compare, doctor."""
