"""Captures of every node of a cluster, made by the scheduler that is already there, in one verdict."""
