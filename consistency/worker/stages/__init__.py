"""One module or folder per stage, and what all of them use."""
