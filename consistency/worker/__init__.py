"""The work of a device's own process, and of the words it shares with the parent."""
