"""Decisions that a model makes in a pass: recorded, replayed, and judged by their margins."""
