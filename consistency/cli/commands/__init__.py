"""The commands: each module adds its own to the parser and runs it, and imports what it needs only then."""
