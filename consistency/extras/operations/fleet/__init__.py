"""Captures of every node of a cluster, made by the engine that is already there, in one verdict."""
