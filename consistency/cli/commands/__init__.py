"""The commands: each module adds its commands to the parser and runs them, and imports other modules only then."""
