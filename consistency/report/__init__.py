"""A comparison as a person, a program, or a test runner reads it."""
