"""Questions beside the run, each of which can be absent: a folder here is an extra, and its `plugin` says what it adds.

The frame names no extra, and an extra no other.
"""
