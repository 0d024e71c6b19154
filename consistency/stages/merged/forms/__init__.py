"""Closed forms: the exact delta and merged weight of a layer from the bytes in the files, and a bound per element."""
