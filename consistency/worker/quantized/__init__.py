"""Quantized bases: their stored parts, their exact values, and merges through requantization."""
