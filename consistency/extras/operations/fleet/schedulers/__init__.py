"""Engines that start captures on the nodes of a cluster."""
