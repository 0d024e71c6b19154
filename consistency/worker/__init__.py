"""The process that runs the checks on one device, and the protocol that it shares with its parent."""
