"""Workers that run side by side as the ranks of one group."""
