"""Commands of the command line that are about what a run left; each module adds its own and does it."""
