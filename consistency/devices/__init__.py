"""The devices of a host, and the facts of the host itself."""
