"""What earlier runs recorded, drift against them, and accepted findings."""
